"""The hooks into Keras 3: :mod:`hooks` is the table, the other files have the replacements."""
