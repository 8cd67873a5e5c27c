//! Files of `/proc` and `/sys` about the machine that are the same in every guest: one processor,
//! one node of memory, the interface `lo`, and no disks.
//!
//! Promises: nothing in them comes from the host but random identifiers.

use afresh_files::{Refused, Time, Tree};

use afresh_sys::PAGE_SIZE;

use crate::sentry::fs::mounts::KINDS;

/// Paths and contents.
const FILES: [(&str, &str); 72] = [
    ("/proc/cgroups", "#subsys_name\thierarchy\tnum_cgroups\tenabled\n"),
    ("/proc/cmdline", "afresh\n"),
    ("/proc/consoles", ""),
    ("/proc/devices", "Character devices:\n  1 mem\n  5 /dev/tty\n136 pts\n\nBlock devices:\n"),
    ("/proc/diskstats", ""),
    ("/proc/interrupts", "           CPU0       \n"),
    ("/proc/modules", ""),
    ("/proc/partitions", "major minor  #blocks  name\n\n"),
    ("/proc/swaps", "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"),
    (
        "/proc/vmstat",
        "nr_free_pages 0\npgpgin 0\npgpgout 0\npswpin 0\npswpout 0\npgfault 0\npgmajfault 0\n",
    ),
    ("/proc/sys/fs/aio-max-nr", "65536\n"),
    ("/proc/sys/fs/file-nr", "0\t0\t65536\n"),
    ("/proc/sys/fs/mqueue/msg_default", "10\n"),
    ("/proc/sys/fs/mqueue/msg_max", "10\n"),
    ("/proc/sys/fs/mqueue/msgsize_default", "8192\n"),
    ("/proc/sys/fs/mqueue/msgsize_max", "8192\n"),
    ("/proc/sys/fs/mqueue/queues_max", "256\n"),
    ("/proc/sys/fs/pipe-max-size", "1048576\n"),
    ("/proc/sys/fs/pipe-user-pages-hard", "0\n"),
    ("/proc/sys/fs/pipe-user-pages-soft", "16384\n"),
    ("/proc/sys/fs/protected_hardlinks", "0\n"),
    ("/proc/sys/fs/protected_symlinks", "0\n"),
    ("/proc/sys/kernel/domainname", "(none)\n"),
    ("/proc/sys/kernel/msgmax", "8192\n"),
    ("/proc/sys/kernel/msgmnb", "16384\n"),
    ("/proc/sys/kernel/msgmni", "1024\n"),
    ("/proc/sys/kernel/ngroups_max", "65536\n"),
    ("/proc/sys/kernel/perf_event_paranoid", "4\n"),
    ("/proc/sys/kernel/random/entropy_avail", "256\n"),
    ("/proc/sys/kernel/random/poolsize", "256\n"),
    ("/proc/sys/kernel/randomize_va_space", "0\n"),
    ("/proc/sys/kernel/sem", "32000\t1024000000\t500\t32000\n"),
    ("/proc/sys/kernel/shmall", "18446744073692774399\n"),
    ("/proc/sys/kernel/shmmax", "18446744073692774399\n"),
    ("/proc/sys/kernel/shmmni", "4096\n"),
    ("/proc/sys/kernel/yama/ptrace_scope", "3\n"),
    ("/proc/sys/net/core/rmem_default", "212992\n"),
    ("/proc/sys/net/core/rmem_max", "4194304\n"),
    ("/proc/sys/net/core/wmem_default", "212992\n"),
    ("/proc/sys/net/core/wmem_max", "4194304\n"),
    ("/proc/sys/net/ipv4/ip_forward", "0\n"),
    ("/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n"),
    ("/proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t4194304\n"),
    ("/proc/sys/net/ipv6/conf/all/disable_ipv6", "0\n"),
    ("/proc/sys/vm/mmap_min_addr", "65536\n"),
    ("/proc/sys/vm/nr_hugepages", "0\n"),
    ("/proc/sys/vm/overcommit_ratio", "50\n"),
    ("/proc/sys/vm/swappiness", "0\n"),
    ("/sys/class/net/lo/address", "00:00:00:00:00:00\n"),
    ("/sys/class/net/lo/carrier", "1\n"),
    ("/sys/class/net/lo/flags", "0x9\n"),
    ("/sys/class/net/lo/ifindex", "1\n"),
    ("/sys/class/net/lo/mtu", "65536\n"),
    ("/sys/class/net/lo/operstate", "unknown\n"),
    ("/sys/class/net/lo/type", "772\n"),
    ("/sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc \n"),
    ("/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"),
    ("/sys/devices/system/cpu/cpu0/topology/core_id", "0\n"),
    ("/sys/devices/system/cpu/cpu0/topology/core_siblings", "1\n"),
    ("/sys/devices/system/cpu/cpu0/topology/core_siblings_list", "0\n"),
    ("/sys/devices/system/cpu/cpu0/topology/physical_package_id", "0\n"),
    ("/sys/devices/system/cpu/cpu0/topology/thread_siblings", "1\n"),
    ("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0\n"),
    ("/sys/devices/system/cpu/kernel_max", "0\n"),
    ("/sys/devices/system/cpu/online", "0\n"),
    ("/sys/devices/system/cpu/possible", "0\n"),
    ("/sys/devices/system/cpu/present", "0\n"),
    ("/sys/devices/system/node/node0/cpulist", "0\n"),
    ("/sys/devices/system/node/node0/cpumap", "1\n"),
    ("/sys/devices/system/node/online", "0\n"),
    ("/sys/devices/system/node/possible", "0\n"),
    ("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
];

/// Writes them, and directories that programs expect to be there.
pub(in crate::sentry) fn write(tree: &mut Tree) -> Result<(), Refused> {
    for path in ["/sys/block", "/sys/fs/cgroup", "/sys/bus", "/sys/kernel/mm/hugepages"] {
        tree.make_directories(path, Time::default())?;
    }
    for (path, text) in FILES {
        put(tree, path, text.as_bytes())?;
    }
    let kinds: String = KINDS.iter().map(|kind| format!("nodev\t{kind}\n")).collect();
    put(tree, "/proc/filesystems", kinds.as_bytes())?;
    put(tree, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", b"2097152\n")?;
    let boot =
        identifier().map(|text| put(tree, "/proc/sys/kernel/random/boot_id", text.as_bytes()));
    boot.transpose().map(drop)
}

fn put(tree: &mut Tree, path: &str, text: &[u8]) -> Result<(), Refused> {
    let node = tree.write_path(path.as_bytes(), text, Time::default())?;
    tree.set_mode(node, 0o444, Time::default())
}

/// A random identifier, as text with its line's end; `None` if the host has no random bytes.
pub(in crate::sentry) fn identifier() -> Option<String> {
    let mut bytes = [0u8; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).ok()?;
    // Of version 4.
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    Some(format!("{}\n", parts.join("-")))
}

/// The content of a file of `/proc/net`: there is the interface `lo`. Lists of sockets are made
/// elsewhere.
pub(in crate::sentry) fn network(name: &[u8]) -> Option<&'static str> {
    Some(match name {
        b"dev" => {
            "Inter-|   Receive                                                |  Transmit\n \
             face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n    \
             lo:       0       0    0    0    0     0          0         0        0       0    0    0    0     0       0          0\n"
        }
        b"if_inet6" => "00000000000000000000000000000001 01 80 10 80       lo\n",
        b"route" => {
            "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        }
        b"arp" => {
            "IP address       HW type     Flags       HW address            Mask     Device\n"
        }
        b"ipv6_route" | b"snmp" | b"netstat" => "",
        b"raw" | b"raw6" => {
            "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n"
        }
        b"sockstat" => {
            "sockets: used 0\nTCP: inuse 0 orphan 0 tw 0 alloc 0 mem 0\nUDP: inuse 0 mem 0\n"
        }
        _ => return None,
    })
}

/// The lines of one mapping in `smaps`, after that of `maps`: its size, and what of that may be
/// resident.
pub(in crate::sentry) fn sizes(
    len: u64,
    resident: u64,
    locked: u64,
    shared: bool,
    flags: &str,
) -> String {
    let [size, rss, locked] = [len, resident, locked].map(|bytes| bytes >> 10);
    let (dirty, private) = if shared { (rss, 0) } else { (0, rss) };
    format!(
        "Size:           {size:>8} kB\nKernelPageSize: {page:>8} kB\nMMUPageSize:    {page:>8} kB\nRss:            {rss:>8} kB\n\
         Pss:            {rss:>8} kB\nShared_Clean:   {zero:>8} kB\nShared_Dirty:   {dirty:>8} kB\nPrivate_Clean:  {zero:>8} kB\n\
         Private_Dirty:  {private:>8} kB\nReferenced:     {rss:>8} kB\nAnonymous:      {private:>8} kB\nSwap:           {zero:>8} kB\n\
         Locked:         {locked:>8} kB\n{flags}",
        page = PAGE_SIZE >> 10,
        zero = 0,
    )
}
