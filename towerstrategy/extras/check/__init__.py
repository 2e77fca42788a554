"""What ``python -m towerstrategy check`` does on a user's machine: a module per question.

Goes in: a machine.  Comes out: :mod:`machine`, what is there; :mod:`same`, how far training on
towers is from one device; :mod:`speed`, steps and memory; :mod:`command`, all of it.
"""
