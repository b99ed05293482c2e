"""KV blocks as plain integers: the pool, the tables, the prefix cache. Nothing here imports mlx."""

from typing import TYPE_CHECKING

from mlxpaged.lazy_names import lazy_names

if TYPE_CHECKING:
    from mlxpaged.cache.block_pool import DEFAULT_BLOCK_SIZE, BlockPool, BlockUsage, OutOfBlocksError
    from mlxpaged.cache.block_table import BlockTable
    from mlxpaged.cache.groups import ONE_GROUP, CacheGroups, blocks_for
    from mlxpaged.cache.prefix_cache import CachedBlock, Content, PrefixCache
    from mlxpaged.cache.table_rows import TableRows
else:
    __getattr__ = lazy_names(__name__, __file__)
