//! Budgets: each is exceeded once, its refusal names it and when to retry, and another tenant is
//! not affected.

use std::time::Duration;

use crate::common::{TEST_TIMEOUT, built, get, run, scratch, serve};
use crate::sandbox::{Client, path, sandboxes, with};
use afresh_serve::{Config, Limits};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

pub(crate) const OTHER_KEY: &str = "key-of-other";

/// A configuration in which the tenant `acme` has these limits.
pub(crate) fn limited(
    dir: &std::path::Path,
    script: &str,
    change: impl FnOnce(&mut Limits),
) -> Config {
    let mut sandboxes = sandboxes(dir, script);
    let mut limits = Limits::default();
    change(&mut limits);
    sandboxes.budgets.tenants.insert("acme".to_owned(), limits);
    with(sandboxes)
}

/// Checks a refusal for a budget.
pub(crate) fn check_refusal((status, answer): &(u16, Value), owner: &str, name: &str) {
    let expected = if owner == "server" { 503 } else { 429 };
    assert_eq!(*status, expected, "{answer}");
    assert_eq!(answer["code"], *status, "{answer}");
    let budget = &answer["budget"];
    assert_eq!((&budget["owner"], &budget["name"]), (&json!(owner), &json!(name)), "{answer}");
    assert!(budget["limit"].is_u64() && budget["used"].is_u64(), "{answer}");
    assert!(budget["retryAfter"].as_u64().unwrap() >= 1, "{answer}");
    let message = answer["message"].as_str().unwrap();
    assert!(message.contains(name) && message.contains("try again after"), "{message}");
}

/// The answer to a request for a new sandbox.
pub(crate) async fn ask_for_one(client: &Client) -> (u16, Value) {
    client.ask(Method::POST, "/sandboxes", json!({"templateID": "script"})).await
}

/// Status, `Retry-After` and JSON of the answer to code.
async fn ask_for_code(client: &Client, sandbox: &Value, code: &str) -> (u16, Value) {
    let response = client.begin(sandbox, code).await;
    let status = response.status();
    if status == StatusCode::TOO_MANY_REQUESTS {
        let after = response.headers()["retry-after"].to_str().unwrap();
        assert!(after.parse::<u64>().unwrap() >= 1, "{after}");
    }
    let text = response.text().await.unwrap();
    (status.as_u16(), serde_json::from_str(&text).unwrap_or_default())
}

#[test]
fn sandboxes_and_their_memory_have_a_budget() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let config = limited(dir.path(), &script, |limits| limits.sandboxes = Some(1));
        let server = serve(config.clone()).await;
        let client = Client::of(&server);
        let other = Client::with_key(&server, OTHER_KEY);
        let own = client.create().await;
        check_refusal(&ask_for_one(&client).await, "tenant", "max-sandboxes");
        other.create().await;
        // A reload renews budgets. With one byte less than the sandbox has, a fork does not fit.
        let (_, usage) = client.ask(Method::GET, "/usage", json!({})).await;
        let memory = usage["now"]["memoryBytes"].as_u64().unwrap();
        assert!(memory > 0, "{usage}");
        let mut renewed = config.clone();
        let budgets = &mut renewed.sandboxes.as_mut().unwrap().budgets;
        let limits = budgets.tenants.get_mut("acme").unwrap();
        limits.sandboxes = None;
        limits.memory = Some(2 * memory - 1);
        server.handle.reload(&renewed).await.unwrap();
        check_refusal(&ask_for_one(&client).await, "tenant", "max-memory-mib");
        let fork = client.ask(Method::POST, &path(&own, "/fork"), json!({})).await;
        check_refusal(&fork, "tenant", "max-memory-mib");
        let checkpoints = path(&own, "/checkpoints");
        client.post(&checkpoints, json!({"name": "one"})).await;
        let drop_checkpoint = path(&own, "/checkpoints/one");
        assert_eq!(client.ask(Method::DELETE, &drop_checkpoint, json!({})).await.0, 204);
        let limit = |config: &mut Config, memory: u64| {
            let budgets = &mut config.sandboxes.as_mut().unwrap().budgets;
            budgets.tenants.get_mut("acme").unwrap().memory = Some(memory);
        };
        limit(&mut renewed, 1);
        server.handle.reload(&renewed).await.unwrap();
        let refused = client.ask(Method::POST, &checkpoints, json!({"name": "two"})).await;
        check_refusal(&refused, "tenant", "max-memory-mib");
        limit(&mut renewed, 2 * memory - 1);
        server.handle.reload(&renewed).await.unwrap();
        other.create().await;
        // A paused sandbox has no memory, and is refused when it would come back.
        assert_eq!(client.ask(Method::POST, &path(&own, "/pause"), json!({})).await.0, 204);
        let second = client.create().await;
        client.post(&path(&own, "/connect"), json!({"timeout": 600})).await;
        check_refusal(&ask_for_code(&client, &own, "1").await, "tenant", "max-memory-mib");
        assert_eq!(client.ask(Method::DELETE, &path(&second, ""), json!({})).await.0, 204);
        assert_eq!(client.value(&own, "6 * 7").await, "42");
        // All tenants together.
        let budgets = &mut renewed.sandboxes.as_mut().unwrap().budgets;
        budgets.tenants.clear();
        budgets.server.sandboxes = Some(3);
        server.handle.reload(&renewed).await.unwrap();
        check_refusal(&ask_for_one(&other).await, "server", "max-sandboxes");
        server.end().await;
    });
}

#[test]
fn saved_states_have_a_budget() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let config = limited(dir.path(), &script, |limits| limits.stored = Some(1 << 10));
        let server = serve(config.clone()).await;
        let client = Client::of(&server);
        let other = Client::with_key(&server, OTHER_KEY);
        let [one, two] = [client.create().await, client.create().await];
        client.value(&one, "var one = 1; one").await;
        client.value(&two, "var two = 2; two").await;
        let snapshots = |sandbox: &Value| path(sandbox, "/snapshots");
        let refused = client.ask(Method::POST, &snapshots(&one), json!({})).await;
        check_refusal(&refused, "tenant", "max-stored-mib");
        assert_eq!(client.ask(Method::GET, "/snapshots", json!({})).await.1, json!([]));
        // The first saved state may exceed the budget, and then there is no room for more.
        assert_eq!(client.ask(Method::POST, &path(&one, "/pause"), json!({})).await.0, 204);
        let refused = client.ask(Method::POST, &path(&two, "/pause"), json!({})).await;
        check_refusal(&refused, "tenant", "max-stored-mib");
        check_refusal(&ask_for_one(&client).await, "tenant", "max-stored-mib");
        assert_eq!(client.value(&two, "two").await, "2");
        let usage = client.ask(Method::GET, "/usage", json!({})).await.1;
        let stored = usage["now"]["storedBytes"].as_u64().unwrap();
        assert!(stored > 1 << 10, "{usage}");
        let free = other.create().await;
        other.post(&snapshots(&free), json!({})).await;
        assert_eq!(other.ask(Method::POST, &path(&free, "/pause"), json!({})).await.0, 204);
        server.end().await;
        // Another server counts what it finds: two saved sandboxes now.
        let server = serve(config).await;
        let client = Client::of(&server);
        let usage = client.ask(Method::GET, "/usage", json!({})).await.1;
        assert!(usage["now"]["storedBytes"].as_u64().unwrap() > stored, "{usage}");
        check_refusal(&ask_for_one(&client).await, "tenant", "max-stored-mib");
        for sandbox in [&one, &two] {
            assert_eq!(client.ask(Method::DELETE, &path(sandbox, ""), json!({})).await.0, 204);
        }
        client.create().await;
        server.end().await;
    });
}

#[test]
fn running_calls_run_time_and_sent_bytes_have_a_budget() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut config = limited(dir.path(), &script, |limits| {
            (limits.running_calls, limits.sandboxes) = (Some(1), Some(3));
        });
        // As many calls of a tenant may wait.
        config.sandboxes.as_mut().unwrap().max_sandboxes = 1;
        config.sandboxes.as_mut().unwrap().call_timeout = 2 * crate::common::TEST_TIMEOUT;
        let server = serve(config.clone()).await;
        let client = Client::of(&server);
        let other = Client::with_key(&server, OTHER_KEY);
        let all = [client.create().await, client.create().await, client.create().await];
        let free = other.create().await;
        let busy = client.begin(&all[0], "console.log('begun'); while (true);").await;
        // One of these waits, and the other is refused.
        let (one, two) = (ask_for_code(&client, &all[1], "1"), ask_for_code(&client, &all[2], "1"));
        tokio::pin!(one, two);
        let refused = tokio::select! {
            refused = &mut one => refused,
            refused = &mut two => refused,
        };
        check_refusal(&refused, "tenant", "max-running-calls");
        assert_eq!(other.value(&free, "1 + 1").await, "2");
        assert_eq!(client.ask(Method::DELETE, &path(&all[0], ""), json!({})).await.0, 204);
        drop(busy);
        // A reload renews budgets.
        let budgets = &mut config.sandboxes.as_mut().unwrap().budgets;
        let mut limits = Limits::default();
        limits.cpu_time = Some(Duration::ZERO);
        budgets.tenants.insert("acme".to_owned(), limits.clone());
        server.handle.reload(&config).await.unwrap();
        let own = &all[1];
        check_refusal(&ask_for_code(&client, own, "1").await, "tenant", "cpu-seconds");
        assert_eq!(other.value(&free, "1 + 1").await, "2");
        (limits.cpu_time, limits.sent) = (None, Some(1 << 20));
        let budgets = &mut config.sandboxes.as_mut().unwrap().budgets;
        budgets.tenants.insert("acme".to_owned(), limits);
        server.handle.reload(&config).await.unwrap();
        // An answer that has begun is completed.
        let lines = client.execute(own, "console.log('x'.repeat(2 << 20))").await.unwrap();
        assert!(lines.iter().any(|line| line["type"] == "end_of_execution"));
        check_refusal(&ask_for_code(&client, own, "1").await, "tenant", "sent-mib");
        assert_eq!(other.value(&free, "1 + 1").await, "2");
        // Its owner still ends it.
        assert_eq!(client.ask(Method::DELETE, &path(own, ""), json!({})).await.0, 204);
        server.end().await;
    });
}

/// A server outside that returns the number of bytes it received; its port.
#[cfg(linux_guests)]
fn sink() -> u16 {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // Its thread ends with the test.
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut received = Vec::new();
            let _ = stream.read_to_end(&mut received);
            let _ = stream.write_all(received.len().to_string().as_bytes());
        }
    });
    port
}

/// The system's Python, or a line that says why it does not run here.
#[cfg(linux_guests)]
pub(crate) fn python() -> Option<&'static str> {
    let found = ["/usr/bin/python3", "/bin/python3"].into_iter();
    let found = found.into_iter().find(|path| std::path::Path::new(path).is_file());
    if found.is_none() {
        println!("SKIPPED: the system has no python3");
    } else if let Err(why) = afresh::linux::Program::new("/bin/true").run(b"") {
        println!("SKIPPED: {why}");
        return None;
    }
    found
}

#[cfg(linux_guests)]
#[test]
fn connections_to_programs_have_a_part_of_the_memory_for_bodies() {
    const LISTEN: &str = "import socket\nlistener = socket.create_server(('', 8000))\n1";
    let Some(guest) = python() else { return };
    let dir = scratch();
    run(async {
        let mut config = with(sandboxes(dir.path(), guest));
        config.max_buffered_bytes = 1 << 20;
        let template = &mut config.sandboxes.as_mut().unwrap().templates[0];
        (template.language, template.linux) = ("python".to_owned(), true);
        let server = serve(config).await;
        let (client, other) = (Client::of(&server), Client::with_key(&server, OTHER_KEY));
        let (own, free) = (client.create().await, other.create().await);
        let dial = |client: &Client, sandbox: &Value, port: u16| {
            let request = client.http.get(server.url("/"));
            let request = request
                .header("e2b-sandbox-id", sandbox["sandboxID"].as_str().unwrap())
                .header("x-access-token", sandbox["envdAccessToken"].as_str().unwrap())
                .header("e2b-sandbox-port", port);
            async move {
                let response = request.send().await.unwrap();
                (response.status().as_u16(), response.text().await.unwrap())
            }
        };
        assert_eq!(client.value(&own, LISTEN).await, "1");
        // A program that answers nothing holds the connections.
        let mut dialing = Vec::new();
        let refused = async {
            loop {
                dialing.push(tokio::spawn(dial(&client, &own, 8000)));
                let (status, text) = dial(&client, &own, 1).await;
                if status != 502 {
                    return (status, text);
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let (status, text) = tokio::time::timeout(TEST_TIMEOUT, refused).await.expect("a refusal");
        assert!(status == 503 && text.contains("close some connections"), "{status} {text}");
        assert!(dialing.iter().any(|dialing| !dialing.is_finished()), "none is held");
        // Another tenant has its own part.
        let (status, text) = dial(&other, &free, 1).await;
        assert!(status == 502 && text.contains("nothing listens"), "{status} {text}");
        dialing.iter().for_each(tokio::task::JoinHandle::abort);
        let closed = async {
            while dial(&client, &own, 1).await.0 != 502 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, closed).await.expect("they leave their memory");
        server.end().await;
    });
}

#[cfg(linux_guests)]
#[test]
fn bytes_to_servers_outside_are_counted_and_have_a_budget() {
    let Some(guest) = python() else { return };
    let dir = scratch();
    run(async {
        let mut config = limited(dir.path(), guest, |limits| limits.outbound = Some(1 << 20));
        let template = &mut config.sandboxes.as_mut().unwrap().templates[0];
        (template.language, template.linux) = ("python".to_owned(), true);
        template.net = vec![format!("sink.test:80=127.0.0.1:{}", sink()).parse().unwrap()];
        let server = serve(config).await;
        let (client, other) = (Client::of(&server), Client::with_key(&server, OTHER_KEY));
        let (own, free) = (client.create().await, other.create().await);
        let send = "import socket\ns = socket.create_connection(('sink.test', 80))\n\
                    s.sendall(b'x' * 1500000)\ns.shutdown(socket.SHUT_WR)\nint(s.recv(64))";
        assert_eq!(client.value(&own, send).await, "1500000");
        let (_, usage) = client.ask(Method::GET, "/usage", json!({})).await;
        assert_eq!(usage["totals"]["outboundBytes"], 1_500_000, "{usage}");
        assert_eq!(usage["limits"]["outboundBytes"], 1 << 20, "{usage}");
        check_refusal(&ask_for_code(&client, &own, "1").await, "tenant", "outbound-mib");
        // Bytes within a sandbox and bytes of another tenant are not counted.
        let inside = "import socket\nl = socket.create_server(('127.0.0.1', 0))\n\
                      c = socket.create_connection(l.getsockname())\nc.send(b'x' * 1000)";
        assert_eq!(other.value(&free, inside).await, "1000");
        let (_, usage) = other.ask(Method::GET, "/usage", json!({})).await;
        assert_eq!(usage["totals"]["outboundBytes"], 0, "{usage}");
        server.end().await;
    });
}

#[test]
fn one_address_has_a_budget_of_connections_and_of_requests() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut config = with(sandboxes(dir.path(), &script));
        config.max_requests_per_address = Some(3);
        config.forwarded_for = true;
        // A client may open a connection for each request: it learns late that one is free.
        config.max_connections_per_address = Some(16);
        let server = serve(config).await;
        let client = Client::of(&server);
        let ask = async |address: &str| {
            let request = client.http.get(server.url("/openapi.json"));
            let response = request.header("x-forwarded-for", address).send().await.unwrap();
            let status = response.status().as_u16();
            (status, serde_json::from_str(&response.text().await.unwrap()).unwrap_or_default())
        };
        for _ in 0..3 {
            assert_eq!(ask("192.0.2.1").await.0, 200);
        }
        check_refusal(&ask("192.0.2.1").await, "address", "max-requests-per-address");
        assert_eq!(ask("192.0.2.2").await.0, 200);
        // Probes are exempt.
        assert_eq!(get(&client.http, &server.url("/readyz")).await.0, 200);
        let mut idle = Vec::new();
        for _ in 0..16 {
            idle.push(tokio::net::TcpStream::connect(server.addr).await.unwrap());
        }
        let refused = tokio::time::timeout(crate::common::TEST_TIMEOUT, async {
            loop {
                // Another client has no connection to reuse.
                let fresh = crate::common::client();
                let (status, text) = get(&fresh, &server.url("/readyz")).await;
                if status != 200 {
                    return (status, serde_json::from_str(&text).unwrap());
                }
            }
        });
        check_refusal(&refused.await.unwrap(), "address", "max-connections-per-address");
        drop(idle);
        server.end().await;
    });
}

#[test]
fn usage_is_shown_to_its_tenant_and_outlasts_a_restart() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let keys = dir.path().join("keys");
        let lines = "acme key-of-acme\nother key-of-other\nops key-of-ops scopes=admin\n";
        std::fs::write(&keys, lines).unwrap();
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.keys = afresh_serve::Keys::read(&keys).unwrap();
        let config = with(sandboxes);
        let server = serve(config.clone()).await;
        let client = Client::of(&server);
        let own = client.create().await;
        client.value(&own, "let n = 0; for (let i = 0; i < 1e5; i++) n += i; n").await;
        let (status, usage) = client.ask(Method::GET, "/usage", json!({})).await;
        assert_eq!((status, &usage["tenant"]), (200, &json!("acme")));
        let totals = usage["totals"].clone();
        assert!(totals["cpuSeconds"].as_f64().unwrap() > 0.0, "{usage}");
        assert!(totals["sentBytes"].as_u64().unwrap() > 100, "{usage}");
        assert!(totals["receivedBytes"].as_u64().unwrap() > 50, "{usage}");
        assert!(totals["memoryByteSeconds"].as_f64().unwrap() > 0.0, "{usage}");
        assert_eq!((&totals["calls"], &totals["sandboxes"]), (&json!(1), &json!(1)));
        assert_eq!(usage["now"]["sandboxes"], 1);
        assert_eq!(usage["limits"]["sandboxes"], 1000);
        // Another tenant's is not its own to see.
        assert_eq!(client.ask(Method::GET, "/usage?tenant=other", json!({})).await.0, 403);
        assert_eq!(client.ask(Method::GET, "/usage?tenant=acme", json!({})).await.0, 200);
        server.end().await;
        let server = serve(config).await;
        let admin = Client::with_key(&server, "key-of-ops");
        let (_, all) = admin.ask(Method::GET, "/usage", json!({})).await;
        let names: Vec<_> =
            all["tenants"].as_array().unwrap().iter().map(|t| &t["tenant"]).collect();
        assert_eq!(names, ["acme", "ops", "other"]);
        let (_, again) = admin.ask(Method::GET, "/usage?tenant=acme", json!({})).await;
        for name in ["cpuSeconds", "sentBytes", "calls", "sandboxes"] {
            let (before, now) = (totals[name].as_f64().unwrap(), again["totals"][name].as_f64());
            assert!(now.unwrap() >= before, "{name}: {again}");
        }
        assert_eq!(admin.ask(Method::GET, "/usage?tenant=nobody", json!({})).await.0, 404);
        // Metrics with the names of tenants are for an operator.
        let open = get(&admin.http, &server.url("/metrics")).await.1;
        assert!(!open.contains("acme") && open.ends_with("# EOF\n"), "{open}");
        let request = admin.http.get(server.url("/metrics")).bearer_auth("key-of-ops");
        let shown = request.send().await.unwrap().text().await.unwrap();
        assert!(shown.contains(r#"afresh_tenant_calls_total{tenant="acme"} 1"#), "{shown}");
        assert!(shown.contains(r#"afresh_tenant_sandboxes{tenant="acme"} 1"#), "{shown}");
        assert!(shown.ends_with("# EOF\n") && shown.matches("# EOF").count() == 1);
        server.end().await;
    });
}

#[test]
fn a_source_of_refused_forks_is_saved_when_it_is_idle() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut config = limited(dir.path(), &script, |limits| limits.sandboxes = Some(2));
        config.admin = Some(config.addr);
        config.sandboxes.as_mut().unwrap().idle_timeout = Duration::from_millis(50);
        let server = serve(config).await;
        let client = Client::of(&server);
        let own = client.create().await;
        client.value(&own, "globalThis.kept = 42").await;
        let fork = path(&own, "/fork");
        let refused = client.ask(Method::POST, &fork, json!({"count": 2})).await;
        check_refusal(&refused, "tenant", "max-sandboxes");
        // One with a fork stays, and the fork with it, until one of the two ends.
        let forks = client.post(&fork, json!({"count": 1})).await;
        let end = path(&forks[0]["sandbox"], "");
        assert_eq!(client.ask(Method::DELETE, &end, json!({})).await.0, 204);
        client.post(&path(&own, "/checkpoints"), json!({"name": "one"})).await;
        let drop_checkpoint = path(&own, "/checkpoints/one");
        assert_eq!(client.ask(Method::DELETE, &drop_checkpoint, json!({})).await.0, 204);
        let saved = async {
            loop {
                let status = get(&client.http, &server.operations("/status.json")).await.1;
                let status: Value = serde_json::from_str(&status).unwrap();
                if status["sandboxes"]["live"] == 0 {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, saved).await.expect("it is saved");
        assert_eq!(client.value(&own, "kept").await, "42");
        server.end().await;
    });
}

#[test]
fn a_build_of_an_image_needs_memory_before_the_pull() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.max_memory = 0;
        let server = serve(with(sandboxes)).await;
        let client = Client::of(&server);
        let build = client.post("/v3/templates", json!({"name": "own"})).await;
        let named = |name: &str| build[name].as_str().unwrap().to_owned();
        let (template, build) = (named("templateID"), named("buildID"));
        let start = format!("/v2/templates/{template}/builds/{build}");
        client.post(&start, json!({"fromImage": "image.test/a:1"})).await;
        let status = format!("/templates/{template}/builds/{build}/status");
        let failed = async {
            loop {
                let (_, said) = client.ask(Method::GET, &status, json!({})).await;
                if said["status"] == "error" {
                    break said["reason"]["message"].as_str().unwrap().to_owned();
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let why = tokio::time::timeout(TEST_TIMEOUT, failed).await.expect("it fails");
        assert!(why.contains("MiB of memory"), "{why}");
        server.end().await;
    });
}

#[test]
fn ended_forks_leave_no_memory_and_calls_are_undone_without_internal_states() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.call_timeout = Duration::from_secs(5);
        let server = serve(with(sandboxes)).await;
        let client = Client::of(&server);
        let own = client.create().await;
        client.execute(&own, "var all = new Uint8Array(1 << 20), now = 0").await.unwrap();
        for round in 1..=5 {
            client.value(&own, &format!("all.fill({round}), now = {round}")).await;
            let forks = client.post(&path(&own, "/fork"), json!({"count": 1})).await;
            let fork = &forks[0]["sandbox"];
            client.value(fork, "all.fill(99).length").await;
            client.value(fork, "all.fill(98).length").await;
            assert_eq!(client.ask(Method::DELETE, &path(fork, ""), json!({})).await.0, 204);
            let (_, tree) = client.ask(Method::GET, &path(&own, "/tree"), json!({})).await;
            assert!(tree["states"].as_array().unwrap().len() <= 3, "{tree}");
        }
        // A relative cannot take away the state that a call is undone to.
        let forks = client.post(&path(&own, "/fork"), json!({"count": 1})).await;
        let fork = &forks[0]["sandbox"];
        let cut = client.execute(&own, "now = 1000; while (true) {}");
        let drop_states = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let (_, tree) = client.ask(Method::GET, &path(fork, "/tree"), json!({})).await;
            for state in tree["states"].as_array().unwrap() {
                let id = state["checkpointID"].as_str().unwrap();
                let to = path(fork, &format!("/checkpoints/{id}"));
                let (status, why) = client.ask(Method::DELETE, &to, json!({})).await;
                assert_eq!(status, 409, "{why}");
            }
        };
        let (cut, ()) = tokio::join!(cut, drop_states);
        assert!(cut.unwrap().iter().any(|line| line["type"] == "error"));
        assert_eq!(client.value(&own, "now").await, "5");
        server.end().await;
    });
}
