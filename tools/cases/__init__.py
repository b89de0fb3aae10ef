"""The cases of `tools/bench`: each module measures a part of kvspool alternately with its floor.

Nothing here imports kvspool before a case runs, because `tools/bench --against` runs these cases on another revision, too.
"""
