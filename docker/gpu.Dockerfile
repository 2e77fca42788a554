# On GPUs, of a machine with the NVIDIA Container Toolkit. CUDA's libraries are those that TensorFlow
# asks pip for; the driver is the machine's.
#     docker build -f docker/gpu.Dockerfile -t towerstrategy:gpu .
#     docker run --rm --gpus all towerstrategy:gpu
FROM python:3.11-slim
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /opt/towerstrategy
COPY setup.py setup.cfg README.md LICENSE ./
COPY towerstrategy towerstrategy
RUN pip install --no-cache-dir ./[gpu]

WORKDIR /work
CMD ["python", "-m", "towerstrategy", "check"]
