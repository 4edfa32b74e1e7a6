"""Output of benchmarks of collectives other than nccl-tests, in the form that they print; all figures
are invented. `EACH` has one text for each entry of `perfkit.readers.dialects.DIALECTS`."""

ONECCL = """
options:
  processes:      8
  backend:        sycl
  buf_count:      1
  inplace:        0
dtype: bfloat16
reduction: sum

#------------------------------------------------------------
# Benchmarking: {operation}
# #processes: 8
#------------------------------------------------------------

        #bytes  #repetitions   t_min[usec]   t_max[usec]   t_avg[usec]  stddev[%]
          1024            16         30.50         33.00         32.00       0.59
       1048576             8        190.00        210.00        200.00       0.10

# All done
"""
ONECCL_CSV = """#ranks,collective,reduction,dtype,dtype_size,#elements/buffer,#buffers,#repetitions,t_min[usec],t_max[usec],t_avg[usec],stddev[%],wait_t_avg[usec]
4,allgatherv,,float32,4,256,1,16,9.5,10.5,10,0.5,0
4,reduce_scatter,sum,float32,4,1024,1,16,19.5,20.5,20,0.5,0
"""
HCCL = """mpirun -n 16 ./bin/{program} -b 1M -e 2M -f 2 -d fp16 -o sum -p 8
the minbytes is 1048576, maxbytes is 2097152, iters is 20, warmup_iters is 10
data_size(Bytes): | aveg_time(us): | alg_bandwidth(GB/s): | check_result:
1048576           | 100.00         | 10.48576             | success
local rank_id 3, check result failed, 2097152 | 160.00 | 13.10720 | failed
2097152           | 160.00         | 13.10720             | {last}
"""
DEEPSPEED = """[2026-01-01 10:00:00,000] [INFO] step 10
Comm. Op            Message Size        Count               Total Latency(ms)   Avg Latency(ms)     tput_avg (Gbps)     busbw_avg (Gbps)
broadcast
                    2.0 KB              100                 9.00                0.08                0.18                0.18
all_gather_into_tensor
                    1.0 MB              100                 50.30               0.50                134.22              117.44
all_reduce | [Caller Func: allreduce_bucket]
                    500.0 MB            10                  100.00              10.00               838.86              734.00
barrier
                    0B                  3                   5.41                1.80                0.00                0.00
all_reduce_of_mine
                    64.0 MB             10                  100.00              10.00               107.37              93.95
"""
STRAGGLERS = """_______________________________
Breakdown with straggler effect
-------------------------------
Comm. Op            Message Size        Count               Total comm lat(ms)  Total straggler(ms) Avg comm lat(ms)    Avg straggler(ms)
all_gather_into_tensor
                    1.0 MB              100                 30.20               20.10               0.30                0.20
all_reduce | [Caller Func: allreduce_bucket]
                    500.0 MB            10                  80.00               20.00               8.00                2.00
"""
DS_BENCH = """
node1: ---- Performance of all_gather on 8 devices ---------------------------------------------------------
node1: Size (Bytes)         Description               Duration             Throughput (Gbps)    BusBW (Gbps)
node1: ----------------------------------------------------------------------------------------------------
node1: 4.0 KB               1024x4                    80.000 us            3.277                2.867
node1: 4.0 GB               1073741824x4              200.000 ms           1374.390             1202.591

node1: ---- Performance of pt2pt on 2 devices ---------------------------------------------------------
node1: 4.0 KB               1024x4                    20.000 us            1.638                1.638
"""
PARAM = """\t PARAM COMM environment: {'world_size': 16, 'local_size': 8, 'global_rank': 0, 'local_rank': 0}

\tCOMMS-RES                                 size (B)  nElementsPerRank   Latency(us):p50         p75         p95         Min         Max    AlgBW(GB/s) BusBW(GB/s)
\tCOMMS-RES-all_reduce-float32           1048576            262144             100.0       101.0       102.0        99.0       103.0         10.486      19.661
\tCOMMS-RES-all_to_all-bfloat16-mine           2097152             65536             200.0       201.0       202.0       199.0       203.0         10.486       9.831
\tCOMMS-RES-QUANT-all_reduce-float32\t        1048576            262144                      1.0            2.0            3.0            6.0
"""
OSU = """srun -N 2 --ntasks-per-node=4 ./osu_{name} -d cuda

# OSU MPI-CUDA {title} Latency Test v7.1
# Datatype: MPI_FLOAT.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
4                      10.00              9.00             11.00        1000
1048576               300.00            290.00            310.00         100
"""
RCCL_CSV = """numCycle,collective,ranks,rankspernode,gpusperrank,size,type,redop,inplace,time,algbw,busbw,#wrong
0,"AllReduce",1,8,8,1,1048576,"float","sum",0,100.000000,10.485760,18.350080,"0"
0,"AllReduce",1,8,8,1,1048576,"float","sum",1,80.000000,13.107200,22.937600,"0"
"""
RCCL_JSON = """[
{"numCycle":0, "name":"AllGather", "gpus":4, "size":1048576, "type":"bfloat16", "redop":"none", "inPlace":0, "time":100.000000, "algBw":10.485760, "busBw":7.864320, "wrong":"N/A"},
{"numCycle":0, "name":"AllGather", "gpus":4, "size":2097152, "type":"bfloat16", "redop":"none", "inPlace":1, "time":160.000000, "algBw":13.107200, "busBw":9.830400, "wrong":"0"}
]
"""
MSCCLPP = """{"algBw":10.48576,"busBw":19.6608,"kernel":3,"name":"allreduce","ranks":16,"ranksPerNode":8,"size":1048576,"time":100.0}
"""
ALL_REDUCE_BENCH = """python -u -m torch.distributed.run --nproc_per_node=8 \\
  --nnodes 2 --rdzv_backend c10d all_reduce_bench.py
Device info: _CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9, minor=0, total_memory=81000MB)

The average bandwidth of all_reduce over 16 ranks (5 warmups / 20 trials):

| payload |    busbw   |    algbw   |
| ------: | ---------: | ---------: |
|   32KiB |   0.10GBps |   0.05GBps |
|    1MiB |  18.75GBps |  10.00GBps |
|    1GiB | 375.00GBps | 200.00GBps |

Legend: 1KiB = 2**10 Bytes, 1MiB = 2**20 Bytes, 1GiB = 2**30 Bytes
"""
OLD_ALL_REDUCE_BENCH = """[node-0:0]:5
[node-0:0]:The average bandwidth of all_reduce with a 4.0GB payload (5 trials, 4 ranks):
[node-0:0]: algbw: 200.000 GBps (1600.0 Gbps)
[node-0:0]: busbw: 300.000 GBps (2400.0 Gbps)
"""
EACH = {
    "all_reduce_bench.py of ml-engineering": ALL_REDUCE_BENCH,
    "oneCCL's benchmark": ONECCL.format(operation="allreduce"),
    "oneCCL's benchmark (CSV)": ONECCL_CSV,
    "HCCL Test": HCCL.format(program="all_reduce_test", last="success"),
    "DeepSpeed's communication logger": DEEPSPEED,
    "DeepSpeed's communication benchmark": DS_BENCH,
    "PARAM's comms.py": PARAM,
    "OSU micro-benchmarks": OSU.format(name="allreduce", title="Allreduce"),
    "rccl-tests (CSV)": RCCL_CSV,
    "rccl-tests (JSON)": RCCL_JSON,
    "mscclpp-test (JSON)": MSCCLPP,
}

#: Head of a log of rccl-tests, and tables with the algorithm (-M 1) and of in-place results alone (-O 0).
RCCL_HEAD = """# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 1048576 maxBytes 1048576 step: 2(factor) warmup iters: 5 iters: 20
#
rccl-tests: Version develop:0000000
# Using devices
#   Rank  0 Pid  56417 on c42f4555f685 device  0 [0002:00:00.0] AMD Instinct MI300X VF
#   Rank  1 Pid  56417 on c42f4555f685 device  1 [0003:00:00.0] AMD Instinct MI300X VF
RCCL version : 2.27.7-develop:0000000
HIP version  : 7.0.51831-000000000
ROCm version : 7.0.1.0-42-0000000
#
"""
RCCL_ALGORITHMS = """#                                                    out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong     algo     proto   nchannels
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
# Testing 1 cycle.
     1048576        262144  fp8_e4m3     sum      -1   100.00   10.49   10.49      0    80.00   13.11   13.11      0    RING    SIMPLE          28
# Testing 2 cycle.
     1048576        262144  fp8_e4m3     sum      -1   110.00    9.53    9.53      0    90.00   11.65   11.65      0    TREE        LL          28
# Errors with asterisks indicate errors that have exceeded the maximum threshold.
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 11.2
"""
RCCL_IN_PLACE = """#                                                               in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1   100.00   10.49   10.49      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 10.5
"""
NVBANDWIDTH = """nvbandwidth Version: v0.8
Built from Git version: v0.8

CUDA Runtime Version: 12080
CUDA Driver Version: 12080
Driver Version: 570.00.00

Device 0: NVIDIA H100 80GB HBM3 (00000000:1b:00)
Device 1: NVIDIA H100 80GB HBM3 (00000000:3b:00)

Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0     55.00     26.00

SUM host_to_device_memcpy_ce 81.00

Running device_to_host_bidirectional_memcpy_ce.
memcpy CE CPU(row) <-> GPU(column) bandwidth (GB/s)
           0         1
 0     40.00     41.00

SUM device_to_host_bidirectional_memcpy_ce 81.00

Running device_to_device_memcpy_read_sm.
memcpy SM GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    390.00
 1    380.00       N/A

SUM device_to_device_memcpy_read_sm 770.00

Running device_local_copy.
memcpy local GPU(column) bandwidth (GB/s)
           0         1
 0   1200.00   1210.00

Running device_to_device_latency_sm.
Device to Device Latency SM GPU(row) <-> GPU(column) (ns)
           0         1
 0       N/A    800.00
 1    810.00       N/A

NOTE: The reported results may not reflect the full capabilities of the platform.
"""
