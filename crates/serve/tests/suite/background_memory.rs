//! Memory that background work of a sandbox writes counts in the budget of its tenant, and work
//! that a budget refuses leaves no memory in use.

use std::time::Duration;

use crate::budgets::{OTHER_KEY, ask_for_one, check_refusal, limited, python};
use crate::common::{Running, TEST_TIMEOUT, get, run, scratch, serve};
use crate::sandbox::{Client, path};
use afresh_serve::{AuditConfig, Config, Limits};
use reqwest::Method;
use serde_json::{Value, json};

/// A thread that writes a MiB at a time, 512 in all.
const FILL: &str = "import threading, time
parts = []
def fill():
    while len(parts) < 512:
        parts.append(b'x' * (1 << 20))
        time.sleep(0.005)
threading.Thread(target=fill, daemon=True).start()
0";
/// The same in a command, which reports when it begins.
const FILL_COMMAND: &str = "import time
print('begun', flush=True)
parts = []
while len(parts) < 512:
    parts.append(b'x' * (1 << 20))
    time.sleep(0.005)";
/// A thread that counts for ever.
const COUNT: &str = "import threading, time
count = 0
def work():
    global count
    while True:
        count += 1
        time.sleep(0.005)
threading.Thread(target=work, daemon=True).start()
0";
const MIB: u64 = 1 << 20;
/// The budget of the tenant beyond the memory of a new sandbox.
const ROOM: u64 = 48 * MIB;
/// Maximum memory beyond the budget: what a sandbox writes in a slice, and some copied pages.
const EXCESS: u64 = 128 * MIB;

/// A server of Python programs, with limits of the tenant `acme`.
fn config_with(dir: &std::path::Path, guest: &str, change: impl FnOnce(&mut Limits)) -> Config {
    let mut config = limited(dir, guest, change);
    config.admin = Some(config.addr);
    config.audit = Some(AuditConfig::new(dir.join("audit")));
    let template = &mut config.sandboxes.as_mut().unwrap().templates[0];
    (template.language, template.linux) = ("python".to_owned(), true);
    config
}

/// Replaces the limits of the tenant `acme`.
async fn limit(server: &Running, config: &mut Config, change: impl FnOnce(&mut Limits)) {
    let mut limits = Limits::default();
    change(&mut limits);
    let budgets = &mut config.sandboxes.as_mut().unwrap().budgets;
    budgets.tenants.insert("acme".to_owned(), limits);
    server.handle.reload(config).await.unwrap();
}

async fn usage(client: &Client) -> Value {
    client.ask(Method::GET, "/usage", json!({})).await.1
}

/// The memory of the tenant.
async fn memory(client: &Client) -> u64 {
    usage(client).await["now"]["memoryBytes"].as_u64().unwrap()
}

/// Waits until a condition holds.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, waiting).await.unwrap_or_else(|_| panic!("{what}"));
}

/// Live sandboxes of the server.
async fn live(client: &Client, server: &Running) -> u64 {
    let status = get(&client.http, &server.operations("/status.json")).await.1;
    serde_json::from_str::<Value>(&status).unwrap()["sandboxes"]["live"].as_u64().unwrap()
}

/// The lines of the audit log for background work.
fn audited(dir: &std::path::Path) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.join("audit")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["action"] == "background work").collect()
}

#[test]
fn background_work_beyond_the_memory_budget_of_its_tenant_stops() {
    let Some(guest) = python() else { return };
    let dir = scratch();
    run(async {
        let mut config = config_with(dir.path(), guest, |_| ());
        let server = serve(config.clone()).await;
        let (client, other) = (Client::of(&server), Client::with_key(&server, OTHER_KEY));
        let (own, free) = (client.create().await, other.create().await);
        other.value(&free, COUNT).await;
        client.value(&own, "1").await;
        let budget = memory(&client).await + ROOM;
        limit(&server, &mut config, |limits| limits.memory = Some(budget)).await;
        // No call follows this one.
        client.value(&own, FILL).await;
        let is_refused = async || {
            usage(&client).await["refused"]["max-memory-mib"].as_u64().is_some_and(|n| n > 0)
        };
        until("its memory counts", is_refused).await;
        let stopped = memory(&client).await;
        assert!(stopped > budget && stopped < budget + EXCESS, "{stopped} of {budget}");
        let lines = audited(dir.path());
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert_eq!((&lines[0]["tenant"], &lines[0]["result"]), (&json!("acme"), &json!("refused")));
        assert_eq!(lines[0]["sandbox"], own["sandboxID"]);
        assert!(lines[0]["reason"].as_str().unwrap().contains("max-memory-mib"), "{lines:?}");
        check_refusal(&ask_for_one(&client).await, "tenant", "max-memory-mib");
        // Another tenant has its own budget, and its background work runs.
        other.create().await;
        let count = async || other.value(&free, "count").await.parse::<u64>().unwrap();
        let before = count().await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(count().await > before + 1);
        assert_eq!(memory(&client).await, stopped);
        // Calls are not refused: the owner makes room, and the work continues.
        let parts = client.value(&own, "len(parts)").await.parse::<u64>().unwrap();
        assert!(parts < (ROOM + EXCESS) / MIB, "{parts}");
        limit(&server, &mut config, |limits| limits.memory = Some(2 * budget + 512 * MIB)).await;
        until("it continues", async || memory(&client).await > budget + 2 * EXCESS).await;
        assert_eq!(client.ask(Method::DELETE, &path(&own, ""), json!({})).await.0, 204);
        client.create().await;
        server.end().await;
    });
}

#[test]
fn clients_of_commands_beyond_the_memory_budget_learn_it() {
    let Some(guest) = python() else { return };
    let dir = scratch();
    run(async {
        let mut config = config_with(dir.path(), guest, |_| ());
        let server = serve(config.clone()).await;
        let client = Client::of(&server);
        let own = client.create().await;
        client.value(&own, "1").await;
        let budget = memory(&client).await + ROOM;
        limit(&server, &mut config, |limits| limits.memory = Some(budget)).await;
        let start = json!({"process": {"cmd": guest, "args": ["-c", FILL_COMMAND]}}).to_string();
        let mut body = vec![0];
        body.extend(u32::try_from(start.len()).unwrap().to_be_bytes());
        body.extend(start.into_bytes());
        let request = client.http.post(server.url("/process.Process/Start"));
        let request = request
            .header("content-type", "application/connect+json")
            .header("e2b-sandbox-id", own["sandboxID"].as_str().unwrap())
            .header("x-access-token", own["envdAccessToken"].as_str().unwrap())
            .body(body);
        let text = request.send().await.unwrap().text().await.unwrap();
        assert!(text.contains("resource_exhausted") && text.contains("max-memory-mib"), "{text}");
        assert!(memory(&client).await < budget + EXCESS);
        server.end().await;
    });
}

#[test]
fn refused_background_work_leaves_memory_and_continues_later() {
    let Some(guest) = python() else { return };
    let dir = scratch();
    run(async {
        let mut config = config_with(dir.path(), guest, |_| ());
        config.sandboxes.as_mut().unwrap().idle_timeout = Duration::from_millis(200);
        let server = serve(config.clone()).await;
        let client = Client::of(&server);
        let own = client.create().await;
        client.value(&own, COUNT).await;
        limit(&server, &mut config, |limits| limits.cpu_time = Some(Duration::ZERO)).await;
        until("it is saved", async || live(&client, &server).await == 0).await;
        assert_eq!(memory(&client).await, 0);
        let lines = audited(dir.path());
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0]["reason"].as_str().unwrap().contains("cpu-seconds"), "{lines:?}");
        // The budget has room again, and no call wakes it.
        limit(&server, &mut config, |_| ()).await;
        until("it continues", async || live(&client, &server).await == 1).await;
        let count = async || client.value(&own, "count").await.parse::<u64>().unwrap();
        let before = count().await;
        assert!(before > 0);
        until("it counts", async || count().await > before + 2).await;
        server.end().await;
    });
}
