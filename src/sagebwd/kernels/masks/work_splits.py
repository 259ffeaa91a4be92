"""Work splits of the backward: each program takes one block list, or one share of a long list.

Keys that all queries see, as sinks and global tokens are, have lists many times as long as the others. Lists are cut
into shares of even lengths, at most what half of one of 132 processors would have of all blocks.

Splits are (batch * heads * blocks of keys + `MOST`, `FIELDS`) int32: the key head counted over the batch, the block of
keys, where the share begins in the lists as if it were a list, of how many blocks seen in part and of how many at all
it is, how many shares the list has, and its number among the lists that are cut, which come first. Behind the last
share are blocks of keys that are not there. `list_kernels` makes them.
"""

# Shares beyond one a list, at most; no more lists are cut.
MOST = 2 * 132
# Blocks of a list that is not cut: a program has work of its own beside them.
LEAST = 32
# Numbers of a program, and of a block in a list, before which as many are its counts.
FIELDS, ENTRY = 8, 4
# Where a listed block of queries has its head, of those that share a key head.
HEAD_BIT = 20
# The backward's lists are multiples of so many numbers: strides of whole 16 numbers are one kernel's.
LENGTHS = 16
