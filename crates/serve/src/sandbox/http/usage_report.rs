//! The use of tenants: `GET /usage` for clients and bills, and the same as metrics.
//!
//! Promises: a key shows its own tenant alone, unless it has the scope `admin`. Metrics have a
//! label for each of the first [`MAX_LABELLED_TENANTS`] tenants and one for all others, so their
//! number is bounded. In a fleet each host reports its own part.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Query, State};
use hyper::StatusCode;
use prometheus_client::encoding::text::encode_registry;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::labels::{Labels, escape};
use crate::sandbox::http::keys::{Identity, KeyError, Scope};
use crate::sandbox::http::response::{Answer, answer};
use crate::sandbox::lifecycle::registry::Sandboxes;
#[cfg(doc)]
use crate::sandbox::tenants::accounts::MAX_LABELLED_TENANTS;
use crate::sandbox::tenants::admission::ResourceUse;
use crate::sandbox::tenants::budgets::Limits;
use crate::sandbox::tenants::processor_metrics::ProcessorMetrics;
use crate::sandbox::tenants::totals::Totals;

#[derive(Deserialize)]
pub(crate) struct UsageQuery {
    tenant: Option<String>,
}

fn describe_limits(limits: &Limits) -> Value {
    json!({
        "sandboxes": limits.sandboxes,
        "memoryBytes": limits.memory,
        "storedBytes": limits.stored,
        "connections": limits.connections,
        "runningCalls": limits.running_calls,
        "cpuSeconds": limits.cpu_time.map(|time| time.as_secs()),
        "sentBytes": limits.sent,
        "outboundBytes": limits.outbound,
        "weight": limits.weight,
    })
}

impl Sandboxes {
    /// The use of one tenant.
    fn usage_of(&self, tenant: &Arc<str>, held: ResourceUse) -> Value {
        let (account, budgets) = (self.accounts.of(tenant), self.accounts.budgets());
        let mut limits = budgets.of(tenant);
        limits.sandboxes = limits.sandboxes.or(Some(self.config.max_sandboxes));
        json!({
            "tenant": tenant,
            "totals": account.totals(),
            "now": {
                "sandboxes": held.sandboxes,
                "memoryBytes": held.memory,
                "storedBytes": held.stored,
                "connections": account.connections(),
            },
            "refused": account.refusals(),
            "limits": describe_limits(&limits),
            "windowSeconds": budgets.window.as_secs(),
        })
    }

    /// The tenants of all keys and accounts.
    fn all_tenants(&self) -> Vec<Arc<str>> {
        let mut all = self.config.keys.tenants();
        all.extend(self.accounts.all().into_keys());
        all.into_iter().collect()
    }

    /// Metrics of tenants, in the text format without its end.
    pub(crate) fn tenant_metrics(&self) -> String {
        let (mut rows, mut refused) = (BTreeMap::<String, Row>::new(), BTreeMap::new());
        let resource_use = self.resource_use();
        for (tenant, account) in self.accounts.all() {
            let label = account.label(&tenant);
            let row = rows.entry(label.to_owned()).or_default();
            let held = resource_use.get(&tenant).copied().unwrap_or_default();
            row.totals.add(&account.totals());
            row.held.sandboxes += held.sandboxes;
            row.held.memory += held.memory;
            row.held.stored += held.stored;
            row.connections += account.connections();
            for (budget, count) in account.refusals() {
                *refused.entry((label.to_owned(), budget)).or_default() += count;
            }
        }
        for (tenant, (running, waiting)) in self.processors.counts() {
            let label = self.accounts.of(&tenant).label(&tenant).to_owned();
            let row = rows.entry(label).or_default();
            row.computing += running as u64;
            row.waiting += waiting as u64;
        }
        encode(&rows, refused, &self.processor_metrics)
    }
}

/// The use of a tenant.
#[derive(Default)]
struct Row {
    totals: Totals,
    held: ResourceUse,
    connections: u64,
    /// Calls that compute.
    computing: u64,
    /// Calls that wait for a processor.
    waiting: u64,
}

/// The metrics of these tenants. `refused` are refusals by tenant and budget.
fn encode(
    rows: &BTreeMap<String, Row>,
    refused: BTreeMap<(String, &'static str), u64>,
    processors: &ProcessorMetrics,
) -> String {
    let mut registry = Registry::with_prefix("afresh_tenant");
    let tenant = |label: &str| -> Labels { vec![("tenant", escape(label))] };
    let gauge = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    type Read<T> = fn(&Row) -> T;
    let counts: [(&str, &str, Option<Unit>, Read<u64>); 5] = [
        ("calls", "Operations of sandboxes", None, |row| row.totals.calls),
        ("made_sandboxes", "Sandboxes made", None, |row| row.totals.sandboxes),
        ("received", "Bytes of requests", Some(Unit::Bytes), |row| row.totals.received_bytes),
        ("sent", "Bytes of answers", Some(Unit::Bytes), |row| row.totals.sent_bytes),
        ("outbound", "Bytes that programs sent to servers outside", Some(Unit::Bytes), |row| {
            row.totals.outbound_bytes
        }),
    ];
    for (name, help, unit, read) in counts {
        let family = Family::<Labels, Counter>::default();
        for (label, row) in rows {
            family.get_or_create(&tenant(label)).inc_by(read(row));
        }
        match unit {
            Some(unit) => registry.register_with_unit(name, help, unit, family),
            None => registry.register(name, help, family),
        }
    }
    type Seconds = Counter<f64, std::sync::atomic::AtomicU64>;
    let times: [(&str, &str, Read<f64>); 3] = [
        ("cpu_seconds", "CPU time of sandboxes", |row| row.totals.cpu_seconds),
        ("memory_byte_seconds", "Memory over time", |row| row.totals.memory_byte_seconds),
        ("stored_byte_seconds", "Saved states over time", |row| row.totals.stored_byte_seconds),
    ];
    for (name, help, read) in times {
        let family = Family::<Labels, Seconds>::default();
        for (label, row) in rows {
            family.get_or_create(&tenant(label)).inc_by(read(row));
        }
        registry.register(name, help, family);
    }
    let gauges: [(&str, &str, Option<Unit>, Read<u64>); 6] = [
        ("sandboxes", "Sandboxes, paused ones included", None, |row| row.held.sandboxes),
        ("connections", "Connections to programs in sandboxes", None, |row| row.connections),
        ("memory", "Memory of live sandboxes", Some(Unit::Bytes), |row| row.held.memory),
        ("stored", "Saved states", Some(Unit::Bytes), |row| row.held.stored),
        ("processor_running", "Calls that compute", None, |row| row.computing),
        ("processor_waiting", "Calls that wait for a processor", None, |row| row.waiting),
    ];
    for (name, help, unit, read) in gauges {
        let family = Family::<Labels, Gauge>::default();
        for (label, row) in rows {
            family.get_or_create(&tenant(label)).set(gauge(read(row)));
        }
        match unit {
            Some(unit) => registry.register_with_unit(name, help, unit, family),
            None => registry.register(name, help, family),
        }
    }
    let family = Family::<Labels, Counter>::default();
    for ((label, budget), count) in refused {
        let mut labels = tenant(&label);
        labels.push(("budget", budget.to_owned()));
        family.get_or_create(&labels).inc_by(count);
    }
    registry.register("refused", "Requests refused for a budget", family);
    processors.register(&mut registry);
    let mut text = String::new();
    // Writing to a string never fails.
    let _ = encode_registry(&mut text, &registry);
    text
}

/// Every metric of tenants, for the reference.
pub(crate) fn sample_tenant_metrics() -> String {
    let rows = BTreeMap::from([("tenant".to_owned(), Row::default())]);
    let refused = BTreeMap::from([(("tenant".to_owned(), "budget"), 1)]);
    encode(&rows, refused, &ProcessorMetrics::sample())
}

pub(crate) async fn usage(
    State(all): State<Arc<Sandboxes>>,
    Extension(identity): Extension<Identity>,
    Query(query): Query<UsageQuery>,
) -> Answer {
    let is_admin = identity.scopes.has(Scope::Admin);
    let own = identity.tenant;
    all.account_resource_use();
    let mut resource_use = all.resource_use();
    let mut of =
        |tenant: &Arc<str>| all.usage_of(tenant, resource_use.remove(tenant).unwrap_or_default());
    let value = match query.tenant {
        None if is_admin => {
            let tenants: Vec<Value> = all.all_tenants().iter().map(&mut of).collect();
            json!({ "tenants": tenants })
        }
        None => of(&own),
        Some(name) if is_admin => match all.all_tenants().iter().find(|known| ***known == *name) {
            Some(known) => of(known),
            None => {
                let message = format!("there is no tenant `{name}`");
                return Err(crate::error_response::ErrorResponse::new(
                    StatusCode::NOT_FOUND,
                    message,
                ));
            }
        },
        Some(name) if *own == *name => of(&own),
        Some(_) => return Err(KeyError::Scope(Scope::Admin).into()),
    };
    Ok(answer(StatusCode::OK, &value))
}
