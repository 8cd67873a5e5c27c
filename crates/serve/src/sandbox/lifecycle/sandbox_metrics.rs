//! Metrics of a sandbox in E2B's shape: a sample of its processor time, memory and files at each
//! request for them.
//!
//! Promises: a request waits for no running call, and wakes no saved sandbox. Its sample is then
//! the last one, with the processor time of now.

use std::time::{Duration, SystemTime};

use axum::extract::Query;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::lock::lock;
use crate::sandbox::http::authorization::TenantSandbox;
use crate::sandbox::http::response::{Answer, answer, rfc3339};
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::{Residency, Sandbox};
use crate::sandbox::lifecycle::tasks::blocking;
use crate::sandbox::tenants::usage::Sample;

/// The interval of samples that a client asks for, in seconds since 1970.
#[derive(Deserialize)]
pub(crate) struct Interval {
    start: Option<u64>,
    end: Option<u64>,
}

impl Interval {
    fn has(&self, sample: &Sample) -> bool {
        let second = sample.time / 1000;
        self.start.is_none_or(|start| second >= start) && self.end.is_none_or(|end| second <= end)
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
    let template = all.template_of(sandbox);
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

pub(crate) async fn metrics(chosen: TenantSandbox, Query(interval): Query<Interval>) -> Answer {
    let (all, sandbox) = chosen.sandbox()?;
    if !sandbox.lifetime().paused {
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
    fn an_interval_has_its_first_and_last_second() {
        let within = Interval { start: Some(100), end: Some(101) };
        let samples = (98_000..103_000).step_by(1000);
        let samples = samples.map(|time| Sample { time, ..Sample::default() });
        assert_eq!(samples.filter(|sample| within.has(sample)).count(), 2);
    }
}
