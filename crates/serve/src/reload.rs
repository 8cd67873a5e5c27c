//! Settings that a reload cannot change.
//!
//! Promises: a reload that leaves a changed setting as it was names it.

use crate::config::Config;
use crate::sandbox::SandboxConfig;

/// Names of the settings whose values differ.
struct Differences(Vec<&'static str>);

impl Differences {
    /// Compares values by their text, since not all types of settings can be compared.
    fn compare(
        &mut self,
        name: &'static str,
        one: &impl std::fmt::Debug,
        two: &impl std::fmt::Debug,
    ) {
        if format!("{one:?}") != format!("{two:?}") {
            self.0.push(name);
        }
    }
}

/// The settings of `new` that differ from those of the running server, and that only a start
/// changes. They are named as in the configuration.
pub(crate) fn settings_for_restart(running: &Config, new: &Config) -> Vec<&'static str> {
    let mut all = Differences(Vec::new());
    let (one, two) = (running, new);
    all.compare("addr", &one.addr, &two.addr);
    all.compare("admin", &one.admin, &two.admin);
    let connections = (one.max_concurrent_connections, two.max_concurrent_connections);
    all.compare("max-concurrent-connections", &connections.0, &connections.1);
    all.compare("max-buffered-mib", &one.max_buffered_bytes, &two.max_buffered_bytes);
    let per_address = (one.max_connections_per_address, two.max_connections_per_address);
    all.compare("max-connections-per-address", &per_address.0, &per_address.1);
    let per_address = (one.max_requests_per_address, two.max_requests_per_address);
    all.compare("max-requests-per-address", &per_address.0, &per_address.1);
    all.compare("forwarded-for", &one.forwarded_for, &two.forwarded_for);
    let path = |config: &Config| config.audit.as_ref().map(|audit| audit.path.clone());
    all.compare("audit", &path(one), &path(two));
    let required = |config: &Config| config.audit.as_ref().is_some_and(|audit| audit.required);
    all.compare("audit-required", &required(one), &required(two));
    all.compare("head-timeout", &one.head_timeout, &two.head_timeout);
    all.compare("body-timeout", &one.body_timeout, &two.body_timeout);
    all.compare("drain", &one.drain, &two.drain);
    all.compare("grace", &one.grace, &two.grace);
    #[cfg(feature = "fleet")]
    all.compare("fleet", &one.fleet, &two.fleet);
    #[cfg(feature = "tls")]
    all.compare("tls-cert", &one.tls.is_some(), &two.tls.is_some());
    match (&one.sandboxes, &two.sandboxes) {
        (Some(one), Some(two)) => compare_sandboxes(&mut all, one, two),
        (one, two) => all.compare("sandboxes", &one.is_some(), &two.is_some()),
    }
    all.0
}

fn compare_sandboxes(all: &mut Differences, one: &SandboxConfig, two: &SandboxConfig) {
    all.compare("sandboxes.store", &one.dir, &two.dir);
    let metrics = (one.requires_metrics_key, two.requires_metrics_key);
    all.compare("sandboxes.require-metrics-key", &metrics.0, &metrics.1);
    all.compare("sandboxes.max-sandboxes", &one.max_sandboxes, &two.max_sandboxes);
    all.compare("sandboxes.max-snapshots", &one.max_snapshots, &two.max_snapshots);
    all.compare("sandboxes.max-running-calls", &one.max_running_calls, &two.max_running_calls);
    all.compare("sandboxes.cpu-limit", &one.cpu_limit, &two.cpu_limit);
    let computing = (one.max_computing_calls, two.max_computing_calls);
    all.compare("sandboxes.max-computing-calls", &computing.0, &computing.1);
    all.compare("sandboxes.max-memory-mib", &one.max_memory, &two.max_memory);
    all.compare("sandboxes.build-images", &one.build_images, &two.build_images);
    all.compare("sandboxes.public-traffic", &one.public_traffic, &two.public_traffic);
    all.compare("sandboxes.idle-timeout", &one.idle_timeout, &two.idle_timeout);
    all.compare("sandboxes.timeout", &one.timeout, &two.timeout);
    all.compare("sandboxes.call-timeout", &one.call_timeout, &two.call_timeout);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::sandbox::Template;

    #[test]
    fn changed_settings_that_a_reload_leaves_are_named() {
        let mut running =
            Config { sandboxes: Some(SandboxConfig::new("/var/a")), ..Config::default() };
        let mut new = running.clone();
        assert!(settings_for_restart(&running, &new).is_empty());
        new.drain = Duration::from_secs(7);
        let sandboxes = new.sandboxes.as_mut().unwrap();
        sandboxes.build_images.push("docker.io/".to_owned());
        // A reload changes templates and budgets.
        sandboxes.templates.push(Template::new("a", "a.wasm", afresh::Options::new()));
        sandboxes.budgets.window = Duration::from_secs(9);
        assert_eq!(settings_for_restart(&running, &new), ["drain", "sandboxes.build-images"]);
        running.sandboxes = None;
        assert_eq!(settings_for_restart(&running, &new), ["drain", "sandboxes"]);
    }
}
