"""Ready-made discoveries of split sources: objects for `discover=` of `split_source`.

:mod:`files` finds files and directories, :mod:`kafka` the messages of topics. Each gives
all splits that exist now, in a fixed order. They must not know how splits are handed out.
"""
