"""What glibc is told where large arrays are made and freed all the time: variables of a process's environment."""

# It hands a freed array's pages back to the kernel at once, and the next step faults every one of them in again. It
# also takes pages of 4 KiB, where by large ones a compiled step on two cores is an eighth faster (docs/LOG.md).
MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
