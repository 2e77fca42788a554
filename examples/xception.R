# Trains Xception on several GPUs from R, with multi_gpu_model.
#
# Goes in: random images.  Comes out: the network trained on the towers; its template, saved and
# loaded as a plain model.
#
#     make demo                         # makes .venv; reticulate: apt-get install r-cran-reticulate
#     RETICULATE_PYTHON=.venv/bin/python Rscript examples/xception.R              # small, anywhere
#     RETICULATE_PYTHON=.venv/bin/python Rscript examples/xception.R 224 1000 1000  # full size, GPUs
#
# Arguments: the images' height and width, the number of classes, the number of images.  The Python
# that reticulate uses has to have towerstrategy installed.

library(reticulate)

np <- import("numpy", convert = FALSE)
tf <- import("tensorflow")
towerstrategy <- import("towerstrategy")

#' Makes a model that shares the weights of `model` and trains on several GPUs.
#'
#' @param model a Keras model
#' @param gpus NULL (all GPUs), a count, or a vector or list of GPU ids or device strings
#' @param cpu_merge whether gradients are merged on the CPU; else on the first GPU
#' @param cpu_relocation whether the weights move to the CPU
multi_gpu_model <- function(model, gpus = NULL, cpu_merge = TRUE, cpu_relocation = FALSE) {
  towerstrategy$multi_gpu_model(model, gpus, cpu_merge = cpu_merge,
                                cpu_relocation = cpu_relocation)
}

arguments <- as.numeric(commandArgs(trailingOnly = TRUE))
size <- if (length(arguments) > 0) arguments[1] else 71
classes <- if (length(arguments) > 1) arguments[2] else 4
samples <- if (length(arguments) > 2) arguments[3] else 8

# R's numbers are doubles; where ints are needed, towerstrategy accepts whole doubles.
count <- length(tf$config$list_physical_devices("GPU"))
gpus <- if (count > 1) as.numeric(count) else towerstrategy$split_cpu(2)

template <- tf$keras$applications$Xception(
  weights = NULL, input_shape = tuple(as.integer(size), as.integer(size), 3L),
  classes = as.integer(classes))
parallel_model <- multi_gpu_model(template, gpus = gpus)
parallel_model$compile(loss = "categorical_crossentropy", optimizer = "rmsprop")

x <- np$random$random(tuple(as.integer(samples), as.integer(size), as.integer(size), 3L))
labels <- sample(0:(classes - 1), samples, replace = TRUE)
y <- tf$keras$utils$to_categorical(np$array(labels), as.integer(classes))
history <- parallel_model$fit(x, y, epochs = 1L, batch_size = 5L, verbose = 0L)
cat("loss:", unlist(history$history$loss), "\n")
cat(parallel_model$distribute_strategy$describe(), "\n")

# The template has the trained weights, and is saved as a plain model.
path <- file.path(tempdir(), "xception.keras")
template$save(path)
loaded <- tf$keras$models$load_model(path)
# In Python, because Debian's reticulate cannot convert arrays of NumPy 2.
difference <- py_to_r(np$max(np$abs(np$subtract(
  loaded$predict(x, verbose = 0L), parallel_model$predict(x, verbose = 0L))))$item())
cat("saved, loaded without a strategy: largest difference of a probability", difference, "\n")
stopifnot(difference < 1e-5)
