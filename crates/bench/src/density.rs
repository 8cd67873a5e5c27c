//! `bench density`: what many live guests of one process cost: mappings, descriptors and memory.
//!
//! Each guest has answered a call and keeps what it wrote. Memory is the proportional share of the
//! process (PSS), and its growth is divided by the number of guests. Page tables are not part of
//! it.

mod pooling;
mod processes;
#[cfg(feature = "linux")]
mod python;
mod usage;

use std::time::Instant;

use afresh_wasm::{Guest, GuestOptions, Mode, Warm, WarmUp};
use anyhow::Result;
use serde_json::json;

use crate::js::REQUEST;
use crate::modules::SMALL_MODULE;
use crate::{Options, Row, Sink};
pub use processes::process;
use usage::Usage;

const TABLE: &str = "density";

/// Guests at the same time.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    /// Of the small module.
    pub small: usize,
    /// Of the JavaScript heap.
    pub js: usize,
    /// Of CPython, as a Linux program.
    pub python: usize,
    /// Processes that open the same snapshot.
    pub processes: usize,
}

impl Counts {
    /// The goals.
    #[must_use]
    pub fn full() -> Self {
        Self { small: 10_000, js: 1000, python: 1000, processes: 20 }
    }

    /// A twentieth of them.
    #[must_use]
    pub fn quick() -> Self {
        Self { small: 500, js: 50, python: 50, processes: 5 }
    }
}

/// The growth of a process and its descendants with its guests.
struct Growth {
    process: u32,
    before: Usage,
    started: Instant,
}

impl Growth {
    fn begin() -> Result<Self> {
        Self::of(std::process::id())
    }

    fn of(process: u32) -> Result<Self> {
        Ok(Self { process, before: Usage::of(process)?, started: Instant::now() })
    }

    /// Reports the growth with `guests` guests. Each has written to pages of `written` KiB. Without
    /// it, the pages count that processes have written and do not share.
    fn report(
        self,
        (case, strategy): (&str, &str),
        (wanted, guests): (usize, usize),
        written: Option<f64>,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let time = self.started.elapsed().as_secs_f64() * 1e6;
        let now = Usage::of(self.process)?;
        let each = |growth: f64| (growth / guests.max(1) as f64 * 100.0).round() / 100.0;
        let private = each(now.written_kib as f64 - self.before.written_kib as f64);
        let written = written.unwrap_or(private);
        let counts = [
            ("guests", guests as f64, "guests"),
            ("start", each(time), "us/guest"),
            ("mappings", each(now.mappings as f64 - self.before.mappings as f64), "per guest"),
            ("descriptors", now.descriptors as f64 - self.before.descriptors as f64, "in all"),
            ("processes", now.processes as f64 - self.before.processes as f64, "in all"),
            ("memory", each(now.pss_kib as f64 - self.before.pss_kib as f64), "KiB/guest"),
        ];
        for (part, value, unit) in counts {
            let mut more = vec![("wanted", json!(wanted))];
            if part == "memory" {
                more.push(("written_kib", json!(written)));
            }
            sink(&Row {
                table: TABLE,
                case: format!("{case}/{part}"),
                strategy: strategy.to_owned(),
                threads: 1,
                median: value,
                min: value,
                p99: value,
                unit,
                samples: vec![value],
                more,
            });
        }
        Ok(())
    }
}

/// `count` leases at the same time, or fewer where one fails, each after a call.
fn leases(
    warm: &Warm,
    count: usize,
    names: (&str, &str),
    mut call: impl FnMut(&mut afresh_wasm::Lease<'_>) -> Result<()>,
    sink: &mut Sink<'_>,
) -> Result<()> {
    // The first guest makes objects that all share.
    call(&mut warm.lease()?)?;
    let copies = usage::copies_kib()?;
    let growth = Growth::begin()?;
    let mut held = Vec::with_capacity(count);
    for _ in 0..count {
        match warm.lease() {
            Ok(mut lease) => {
                call(&mut lease)?;
                held.push(lease);
            }
            Err(error) => {
                eprintln!("{} {}: {} guests: {error}", names.0, names.1, held.len());
                break;
            }
        }
    }
    let reached = held.len();
    let mut written = 0;
    for lease in held.iter_mut().take(16) {
        written += lease.dirty_pages()?;
    }
    // A page that was written and has its old content again is not counted as dirty. In an image of
    // a file it is a copy all the same.
    let dirty = written as f64 * 4.0 / reached.clamp(1, 16) as f64;
    let copied = (usage::copies_kib()? - copies) as f64 / reached.max(1) as f64;
    growth.report(names, (count, reached), Some(dirty.max(copied)), sink)
}

/// All cases. Without the JavaScript guest its case is left out.
///
/// # Errors
/// The first that any contestant meets. A guest that cannot be made is no error: the row `guests`
/// has their number.
pub fn all(
    js: Option<&[u8]>,
    counts: Counts,
    options: &Options,
    sink: &mut Sink<'_>,
) -> Result<()> {
    let engine = crate::code_cache::engine()?;
    let warm = |wasm: &[u8], warm_up| -> Result<Warm> {
        let with = GuestOptions { mode: Mode::Reset, ..GuestOptions::default() };
        Ok(Guest::with_options(&engine, wasm, with)?.warm(warm_up)?)
    };
    let small = SMALL_MODULE.module();
    if options.wants("small", "afresh") {
        let guest = warm(&small, WarmUp::new())?;
        let call = |lease: &mut afresh_wasm::Lease<'_>| {
            lease.call("scatter64", &[])?;
            Ok(())
        };
        leases(&guest, counts.small, ("small", "afresh"), call, sink)?;
    }
    if options.wants("small", "wasmtime/pooling") {
        pooling::small(&small, counts.small, ("small", "wasmtime/pooling"), sink)?;
    }
    if let Some(js) = js
        && options.wants("js", "afresh")
    {
        let guest = warm(js, WarmUp::new().call("warm", &[]))?;
        let entry = guest.bytes_entry("handle")?;
        let call = |lease: &mut afresh_wasm::Lease<'_>| {
            lease.call_bytes(&entry, REQUEST)?;
            Ok(())
        };
        leases(&guest, counts.js, ("js", "afresh"), call, sink)?;
    }
    if let Some(js) = js
        && options.wants("js", "wasmtime/pooling")
    {
        let warm = crate::js::wizen(js, "warm")?;
        pooling::js(&warm, counts.js, ("js", "wasmtime/pooling"), sink)?;
    }
    if let Some(js) = js {
        processes::all(js, counts.processes, options, sink)?;
    }
    #[cfg(feature = "linux")]
    python::all(counts.python, options, sink)?;
    Ok(())
}
