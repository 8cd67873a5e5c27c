//! Published figures of the documents behind afresh, for comparison with ours.
//!
//! Each comes from another machine, so only the ratios within one document can be compared with the
//! ratios of a report.

/// One table of a document.
pub(super) struct PublishedTable {
    /// Title and place of the document.
    pub(super) source: &'static str,
    /// What was measured.
    pub(super) title: &'static str,
    /// Unit of all figures.
    pub(super) unit: &'static str,
    pub(super) columns: &'static [&'static str],
    pub(super) rows: &'static [(&'static str, &'static [f64])],
    /// Our rows for the same question: table, case and strategies.
    pub(super) ours: &'static [(&'static str, &'static str, &'static [&'static str])],
}

const POOLING: &str =
    "wasmtime pull request 3697, “memfd/madvise-based CoW pooling allocator”, 2022";
const STRATEGIES: [&str; 5] = [
    "pooling with userfaultfd",
    "pooling without",
    "new instance",
    "instance reuse (pull request 3691)",
    "pooling with memfd",
];

pub(super) const PUBLISHED: [PublishedTable; 4] = [
    PublishedTable {
        source: POOLING,
        title: "A call of an empty function in a new or reset instance, by threads",
        unit: "us",
        columns: &STRATEGIES,
        rows: &[
            ("1 thread", &[41.0, 78.0, 80.0, 4.0, 27.0]),
            ("2 threads", &[63.0, 110.0, 114.0, 11.0, 43.0]),
            ("4 threads", &[76.0, 172.0, 188.0, 17.0, 66.0]),
            ("8 threads", &[123.0, 360.0, 439.0, 24.0, 89.0]),
            ("16 threads", &[286.0, 695.0, 1117.0, 36.0, 127.0]),
        ],
        ours: &[("wasm", "small/empty", &["reset", "fresh", "wasmtime/pooling-cow"])],
    },
    PublishedTable {
        source: POOLING,
        title: "A call that writes 1 MiB in a new or reset instance, by threads",
        unit: "us",
        columns: &STRATEGIES,
        rows: &[
            ("1 thread", &[312.0, 216.0, 221.0, 144.0, 238.0]),
            ("2 threads", &[844.0, 325.0, 334.0, 209.0, 385.0]),
            ("4 threads", &[1400.0, 526.0, 549.0, 306.0, 453.0]),
            ("8 threads", &[1979.0, 1047.0, 1168.0, 581.0, 618.0]),
            ("16 threads", &[3084.0, 1814.0, 1954.0, 765.0, 840.0]),
        ],
        ours: &[("wasm", "small/dirty1MiB", &["reset", "fresh", "wasmtime/pooling-cow"])],
    },
    PublishedTable {
        source: "Kevlar, “The mmap_fault Investigation: Closing the Last 15% Gap”, medians",
        title: "First touch of 16 MiB of anonymous memory, a page",
        unit: "ns",
        columns: &["Linux on KVM", "Kevlar on KVM"],
        rows: &[("sequential", &[1692.0, 1942.0])],
        ours: &[("fault", "16MiB/seq", &["plain", "pool-background", "lease-pool"])],
    },
    PublishedTable {
        source: "R. Vansa, “Replacing mmap with userfaultfd”, crac-dev, May 2023",
        title: "512 MiB read in whole, a file in the page cache",
        unit: "ms",
        columns: &[
            "mmap",
            "mmap, populated (and its call)",
            "userfaultfd copy",
            "userfaultfd remap",
            "copy, 2 MiB pages",
            "remap, 2 MiB pages",
        ],
        rows: &[("all pages", &[33.8, 26.5, 671.0, 1124.0, 105.6, 165.3])],
        ours: &[("restore", "random/read", &["mmap", "uffd-copy", "map-detach", "stream"])],
    },
];
