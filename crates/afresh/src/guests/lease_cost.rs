//! The cost of calls of a lease.

use super::backend::{LiveInstance, dispatch};
use super::call_cost::{CallCost, CostMeter};
use super::lease::Lease;

impl Lease<'_> {
    /// Measures the calls that `calls` makes through this lease, also failed ones. A measurement
    /// takes about a microsecond.
    ///
    /// ```
    /// # #[cfg(feature = "wasm")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use afresh::{Guest, Options};
    /// # let wasm = wat::parse_str(r#"(module (memory (export "memory") 1)
    /// #   (func (export "afresh_buffer") (param i32) (result i32) (i32.const 8))
    /// #   (func (export "echo") (param i32) (result i64)
    /// #     (i64.or (i64.shl (i64.const 8) (i64.const 32)) (i64.extend_i32_u (local.get 0)))))"#)?;
    /// let guest = Guest::from_bytes("echo", &wasm, &Options::new())?;
    /// let (answer, cost) = guest.lease()?.measure(|lease| lease.call("echo", b"four"));
    /// assert_eq!(answer?, b"four");
    /// assert_eq!((cost.input_bytes, cost.output_bytes), (4, 4));
    /// assert_eq!(cost.peak_memory, Some(65536));
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "wasm"))]
    /// # fn main() {}
    /// ```
    pub fn measure<T>(&mut self, calls: impl FnOnce(&mut Self) -> T) -> (T, CallCost) {
        let memory = dispatch!(Instance, &self.instance, live => live.count_memory());
        let bytes = std::mem::take(&mut self.bytes);
        let meter = CostMeter::start(memory.unwrap_or(0));
        let result = calls(self);
        let (mut cost, peak) = meter.stop();
        // The memory of a Wasm guest never shrinks, and a Linux program notes its peak.
        let memory = dispatch!(Instance, &self.instance, live => live.count_memory());
        cost.peak_memory = memory.map(|memory| memory.max(peak));
        (cost.input_bytes, cost.output_bytes) = (self.bytes.input, self.bytes.output);
        // A measurement around this one counts them as well.
        self.bytes.input += bytes.input;
        self.bytes.output += bytes.output;
        (result, cost)
    }

    /// As [`Lease::measure`], and counts the pages that differ afterwards. For that it compares the
    /// write set.
    pub fn measure_pages<T>(&mut self, calls: impl FnOnce(&mut Self) -> T) -> (T, CallCost) {
        let (result, cost) = self.measure(calls);
        let dirty_pages = dispatch!(Instance, &mut self.instance, live => live.count_dirty_pages());
        (result, CallCost { dirty_pages, ..cost })
    }
}
