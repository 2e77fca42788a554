"""What ``python -m towerstrategy check`` does on a user's machine: a module per question.

Goes in: a machine.  Comes out: :mod:`machine`, what is there and how devices reach each other;
:mod:`same`, how far training on towers is from one device; :mod:`speed`, steps and memory of one
device, MirroredStrategy and each merge device, and what they advise; :mod:`command`, all of it as
text and as the JSON that a bug report holds.
"""
