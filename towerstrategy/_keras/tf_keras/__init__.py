"""The hooks into tf_keras: :mod:`hooks` is the table, the other files have the replacements."""
