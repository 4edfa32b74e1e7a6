"""Compute kernels of embedding tables: where the rows of a table lie, in TorchRec's words."""

from dataclasses import dataclass

#: Share of the rows of a table that a cache in device memory holds where nobody says it [-]: that of
#: TorchRec's planner, ``UVM_CACHING_RATIO`` in torchrec/distributed/planner/constants.py, and of
#: ``cache_load_factor`` in FBGEMM's split table-batched embeddings.
LOAD_FACTOR = 0.2


@dataclass(frozen=True)
class TableKernel:
    """A compute kernel of a table.

    Parameters
    ----------
    name : str
        The name in arguments and results.
    torchrec_name : str
        ``compute_kernel`` in plans of TorchRec.
    home : str
        Where all rows lie, in words.
    is_on_device : bool
        Whether all rows lie in device memory.
    has_cache : bool
        Whether a cache in device memory holds a share of the rows.
    """

    name: str
    torchrec_name: str
    home: str
    is_on_device: bool = False
    has_cache: bool = False


#: All rows in device memory.
FUSED = TableKernel("fused", "fused", "device memory", is_on_device=True)
#: Rows in host memory, which the kernel of the GPU reads over the link.
UVM = TableKernel("uvm", "fused_uvm", "host memory")
#: Rows in host memory, with a cache in device memory that software manages.
UVM_CACHING = TableKernel("uvm_caching", "fused_uvm_caching", "host memory", has_cache=True)
#: Rows in a key-value store on SSDs.
KEY_VALUE = TableKernel("key_value", "key_value", "an SSD", has_cache=True)
#: All kernels by name.
TABLE_KERNELS = {kernel.name: kernel for kernel in (FUSED, UVM, UVM_CACHING, KEY_VALUE)}
