"""What is hooked in Keras 3: :mod:`hooks` is the table, the other files are its subjects."""
