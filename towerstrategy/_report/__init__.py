"""How ``towerstrategy.report`` looks into a training: a room per question.

Goes in: a Keras training on the towers.  Comes out: :mod:`rows`, the rows that each tower got;
:mod:`sample`, where the time of one step went; :mod:`picture`, both as a PNG; :mod:`events`, both
for TensorBoard.
"""
