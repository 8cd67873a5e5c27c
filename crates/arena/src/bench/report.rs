//! Rows of the report and how they are printed.

use std::fmt;

/// Median, least and 99th percentile of the cycles of one row, in nanoseconds a page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The middle one.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The one that 99 in 100 do not exceed.
    pub p99: f64,
}

impl Spread {
    /// Of the values, each divided by `pages`; zero of none.
    pub(super) fn of(values: impl IntoIterator<Item = f64>, pages: usize) -> Self {
        let mut sorted: Vec<f64> = values.into_iter().map(|v| v / pages as f64).collect();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().saturating_sub(1);
        let at = |share: f64| sorted.get((last as f64 * share).round() as usize).copied();
        let pick = |share| at(share).unwrap_or(0.0);
        Self { median: pick(0.5), min: pick(0.0), p99: pick(0.99) }
    }
}

/// One row; prints itself as a line of JSON.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Row {
    /// Case, such as `16MiB/seq`.
    pub case: &'static str,
    /// Strategy, such as `plain`.
    pub strategy: &'static str,
    /// Threads that ran it at once.
    pub threads: usize,
    /// Cycles measured, over all threads.
    pub cycles: usize,
    /// The whole cycle.
    pub whole: Spread,
    /// Taking and mapping alone.
    pub take: Spread,
    /// Touching alone.
    pub touch: Spread,
    /// Giving back alone.
    pub give: Spread,
    /// Instructions a page, of the measured thread, in user mode and in the kernel; zero where the
    /// host does not count them.
    pub instructions: f64,
    /// Processor time of a background thread, in nanoseconds a page touched.
    pub background: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { case, strategy, threads, cycles, whole, take, touch, give, .. } = self;
        let Self { instructions, background, .. } = self;
        write!(
            f,
            "{{\"table\":\"fault\",\"case\":\"{case}\",\"strategy\":\"{strategy}\",\
             \"threads\":{threads},\"median\":{:.2},\"min\":{:.2},\"p99\":{:.2},\
             \"unit\":\"ns/page\",\"cycles\":{cycles},\"take\":{:.2},\"touch\":{:.2},\
             \"give_back\":{:.2},\"background\":{background:.2},\
             \"instructions\":{instructions:.1}}}",
            whole.median, whole.min, whole.p99, take.median, touch.median, give.median,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spread_of_a_hundred_and_one_values_is_exact() {
        let spread = Spread::of((0..=100).map(f64::from), 1);
        assert_eq!(spread, Spread { median: 50.0, min: 0.0, p99: 99.0 });
        assert_eq!(Spread::of([], 1).median, 0.0);
    }
}
