//! Metrics of a sandbox in E2B's shape: a sample of its processor time, memory and files at each
//! request for them.
//!
//! Promises: a request waits for no running call, and wakes no saved sandbox. Its sample is then
//! the last one, with the processor time of now. Processor time is that of calls and of background
//! work, without their waits.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use axum::extract::Query;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::control::rfc3339;
use super::record::milliseconds;
use super::registry::{Sandboxes, blocking, lock};
use super::routes::{Answer, TenantSandbox, answer};
use super::sandbox::{Residency, Sandbox};

/// Maximum samples of a sandbox.
const MAX_SAMPLES: usize = 120;

/// The use of a sandbox, and samples of it.
#[derive(Default)]
pub(super) struct Usage {
    /// Nanoseconds of CPU time.
    ran: AtomicU64,
    samples: Mutex<Samples>,
}

#[derive(Default)]
struct Samples {
    all: VecDeque<Sample>,
    /// When the last sample was taken, and the time that it had run by then.
    last: Option<(Instant, u64)>,
}

#[derive(Clone, Copy, Default)]
struct Sample {
    /// Milliseconds since 1970.
    time: u64,
    processor: f64,
    memory: u64,
    files: u64,
}

/// The interval of samples that a client asks for, in seconds since 1970.
#[derive(Deserialize)]
pub(super) struct Interval {
    start: Option<u64>,
    end: Option<u64>,
}

impl Interval {
    fn has(&self, sample: &Sample) -> bool {
        let second = sample.time / 1000;
        self.start.is_none_or(|start| second >= start) && self.end.is_none_or(|end| second <= end)
    }
}

impl Usage {
    /// It took this CPU time.
    pub(super) fn ran(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.ran.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Takes a sample. `sizes` are bytes of memory and of files, unless the sandbox is called or
    /// saved.
    fn sample(&self, now: SystemTime, age: Duration, sizes: Option<(u64, u64)>) {
        let ran = self.ran.load(Ordering::Relaxed);
        let mut samples = lock(&self.samples);
        let (time, before) = match samples.last {
            Some((taken, before)) => (taken.elapsed(), before),
            None => (age, 0),
        };
        let share = ran.saturating_sub(before) as f64 / time.as_nanos().max(1) as f64;
        let last = samples.all.back().copied().unwrap_or_default();
        let (memory, files) = sizes.unwrap_or((last.memory, last.files));
        let processor = (share * 100.0).min(100.0);
        if samples.all.len() >= MAX_SAMPLES {
            samples.all.pop_front();
        }
        samples.all.push_back(Sample { time: milliseconds(now), processor, memory, files });
        samples.last = Some((Instant::now(), ran));
    }
}

/// Bytes of memory that a live sandbox stores, and of its files; `None` while it is called or
/// saved.
async fn sizes(sandbox: &Sandbox) -> Option<(u64, u64)> {
    let mut life = sandbox.life.clone().try_lock_owned().ok()?;
    let measured = blocking(move || {
        let Residency::Live(session) = &mut *life else { return Ok(None) };
        let at = session.at();
        let states = session.tree();
        let pages = states.iter().find(|state| state.id == at).map(|state| state.stored_pages);
        let files = session.files().map_or(0, |files| files.tree().used().bytes);
        let page = rustix::param::page_size();
        Ok(Some(((pages.unwrap_or(0) * page) as u64, files)))
    });
    measured.await.ok().flatten()
}

fn describe_sample(all: &Sandboxes, sandbox: &Sandbox, sample: &Sample) -> Value {
    let template = all.template(&sandbox.template);
    let time = SystemTime::UNIX_EPOCH + Duration::from_millis(sample.time);
    json!({
        "timestamp": rfc3339(time),
        "timestampUnix": sample.time / 1000,
        "cpuCount": 1,
        "cpuUsedPct": sample.processor,
        "memUsed": sample.memory,
        "memTotal": template.config.memory,
        "memCache": 0,
        "diskUsed": sample.files,
        "diskTotal": template.config.files,
    })
}

pub(super) async fn metrics(chosen: TenantSandbox, Query(interval): Query<Interval>) -> Answer {
    let (all, sandbox) = chosen.sandbox()?;
    if !sandbox.times().paused {
        let age = sandbox.started.elapsed().unwrap_or_default();
        let sizes = sizes(&sandbox).await;
        sandbox.usage.sample(SystemTime::now(), age, sizes);
    }
    let samples: Vec<_> = lock(&sandbox.usage.samples).all.iter().copied().collect();
    let wanted = samples.iter().filter(|sample| interval.has(sample));
    let listed: Vec<_> = wanted.map(|sample| describe_sample(&all, &sandbox, sample)).collect();
    Ok(answer(StatusCode::OK, &Value::Array(listed)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_bounded_and_have_the_share_of_time() {
        let usage = Usage::default();
        usage.ran(Duration::from_secs(5));
        usage.sample(SystemTime::UNIX_EPOCH, Duration::from_secs(10), Some((7, 8)));
        assert_eq!(lock(&usage.samples).all[0].processor, 50.0);
        for second in 1..200 {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(second);
            usage.sample(time, Duration::ZERO, None);
        }
        let samples = lock(&usage.samples);
        assert_eq!(samples.all.len(), MAX_SAMPLES);
        let last = samples.all.back().unwrap();
        assert_eq!((last.time, last.processor, last.memory, last.files), (199_000, 0.0, 7, 8));
        let within = Interval { start: Some(100), end: Some(101) };
        assert_eq!(samples.all.iter().filter(|sample| within.has(sample)).count(), 2);
    }
}
