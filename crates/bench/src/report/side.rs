//! The owner of a row: afresh, a rival, or the work alone.

use super::Measurement;

/// The owner of a strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// A strategy that afresh offers.
    Afresh,
    /// Another program, or a known technique that afresh is compared with.
    Rival,
    /// The cost of the work alone, without a reset: no pristine call can be cheaper.
    Floor,
}

impl Side {
    /// The class of its marks and rows on the page, which sets their colour.
    pub(super) fn class(self) -> &'static str {
        match self {
            Self::Afresh => "ours",
            Self::Rival => "rival",
            Self::Floor => "floor",
        }
    }
}

/// Beginnings of strategies without a reset. The same program without afresh, `native`, is a rival.
const FLOORS: [&str; 4] = ["floor", "none", "resident", "write+fsync"];

/// Techniques that afresh has as fallbacks and for comparison.
const TECHNIQUES: [&str; 6] =
    ["full-copy", "discard", "reprotect", "reset/full-copy", "reset/discard", "reset/reprotect"];

/// Beginnings of the strategies of afresh.
const OURS: [&str; 22] = [
    "afresh",
    "arena",
    "auto",
    "bytes of",
    "fresh",
    "held",
    "kernel",
    "lazy",
    "lease",
    "map-detach",
    "pages of",
    "pool-",
    "reset",
    "restore",
    "simulated",
    "snapshot",
    "stage",
    "stream",
    "uffd-",
    "working-set",
    "write-set",
    "a snapshot",
];

impl Measurement {
    /// The owner of the strategy.
    #[must_use]
    pub fn side(&self) -> Side {
        let begins = |names: &[&str]| names.iter().any(|name| self.strategy.starts_with(name));
        if begins(&FLOORS) {
            Side::Floor
        } else if !begins(&TECHNIQUES) && begins(&OURS) {
            Side::Afresh
        } else {
            Side::Rival
        }
    }

    /// Whether a lower figure is better. Counts and rates have no winner.
    #[must_use]
    pub fn is_time(&self) -> bool {
        matches!(self.unit.as_str(), "ns" | "ns/page" | "us" | "ms" | "s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Row;

    #[test]
    fn strategies_belong_to_their_owners() {
        let side = |strategy: &str| {
            let row = Row {
                table: "wasm",
                case: String::new(),
                strategy: strategy.to_owned(),
                threads: 1,
                median: 1.0,
                min: 1.0,
                p99: 1.0,
                unit: "us",
                samples: Vec::new(),
                more: Vec::new(),
            };
            serde_json::from_str::<Measurement>(&row.json()).unwrap().side()
        };
        for ours in ["reset", "fresh", "reset/write-set-uffd", "afresh, 50 turns", "pool-inline"] {
            assert_eq!(side(ours), Side::Afresh, "{ours}");
        }
        for rival in ["wasmtime/pooling-cow", "mmap", "reset/full-copy", "discard", "fork-server"]
            .into_iter()
            .chain([
                "gvisor/systrap",
                "eryx/pool",
                "afl++/persistent",
                "libafl/fork-server",
                "native",
            ])
        {
            assert_eq!(side(rival), Side::Rival, "{rival}");
        }
        for floor in ["floor/never-reset", "none", "resident"] {
            assert_eq!(side(floor), Side::Floor, "{floor}");
        }
    }
}
