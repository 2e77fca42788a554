"""What is hooked in tf_keras: :mod:`hooks` is the table, the other files are its subjects."""
