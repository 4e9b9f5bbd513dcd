"""The cache: a teacher's targets for a corpus, in checked Zarr arrays.

import cache
c = cache.open("out/cache")
batch = c.rows([0, 5, 3])          # {"tokens": …, "target_ids": …, …}
weights = c.weights(batch)          # [3, length, k]
"""

from cache.copying import Copied, copy
from cache.derive import Derived, derive
from cache.encoding import encode_shard, weights
from cache.errors import CacheError, Damage, DamageError
from cache.format import Encoding
from cache.manifest import Manifest
from cache.options import DeriveOptions
from cache.reader import Cache, open
from cache.storage import StorageError, Store
from cache.verify import Report, verify

__all__ = [
    "Cache",
    "CacheError",
    "Copied",
    "Damage",
    "DamageError",
    "DeriveOptions",
    "Derived",
    "Encoding",
    "Manifest",
    "Report",
    "StorageError",
    "Store",
    "copy",
    "derive",
    "encode_shard",
    "open",
    "verify",
    "weights",
]
