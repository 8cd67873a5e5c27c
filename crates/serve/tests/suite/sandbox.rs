//! Sandboxes over HTTP: they keep the state of code, go back, fork, are saved and come back, and
//! are visible to their tenant only.

use std::path::Path;
use std::time::Duration;

use crate::common::{self, Running, built, client, config, run, scratch, serve};
use afresh_serve::{Config, Keys, SandboxConfig, Template};
use reqwest::Method;
use serde_json::{Value, json};

pub(crate) const KEY: &str = "key-of-acme";

pub(crate) fn sandboxes(dir: &Path, script: &str) -> SandboxConfig {
    let mut sandboxes = SandboxConfig::new(dir);
    sandboxes.keys = Keys::new([("acme", KEY), ("other", "key-of-other")]);
    sandboxes.call_timeout = Duration::from_secs(60);
    sandboxes.templates.push(Template::new("script", script, afresh::Options::new()));
    sandboxes
}

pub(crate) fn with(sandboxes: SandboxConfig) -> Config {
    let mut config = config([]);
    config.sandboxes = Some(sandboxes);
    config
}

/// A client of the control plane and of the agents inside sandboxes.
pub(crate) struct Client {
    pub(crate) http: reqwest::Client,
    pub(crate) base: String,
    pub(crate) key: &'static str,
}

impl Client {
    pub(crate) fn of(server: &Running) -> Self {
        Self { http: client(), base: server.url(""), key: KEY }
    }

    /// A client of another key.
    pub(crate) fn with_key(server: &Running, key: &'static str) -> Self {
        Self { key, ..Self::of(server) }
    }

    /// Asks the control plane; gives the status, and the answer where it is JSON.
    pub(crate) async fn ask(&self, method: Method, path: &str, body: Value) -> (u16, Value) {
        let request = self.http.request(method, format!("{}{path}", self.base));
        let request = request.header("x-api-key", self.key).body(body.to_string());
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        (status, serde_json::from_str(&response.text().await.unwrap()).unwrap_or_default())
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Value {
        let (status, answer) = self.ask(Method::POST, path, body).await;
        assert!((200..300).contains(&status), "{path}: {status} {answer}");
        answer
    }

    pub(crate) async fn create(&self) -> Value {
        self.post("/v2/sandboxes", json!({"templateID": "script", "timeout": 600})).await
    }

    /// Begins to run code.
    pub(crate) async fn begin(&self, sandbox: &Value, code: &str) -> reqwest::Response {
        let request = self
            .http
            .post(format!("{}/execute", self.base))
            .header("e2b-sandbox-id", sandbox["sandboxID"].as_str().unwrap())
            .header("x-access-token", sandbox["envdAccessToken"].as_str().unwrap())
            .body(json!({"code": code}).to_string());
        request.send().await.unwrap()
    }

    /// Runs code; gives the lines of the answer, or the status.
    pub(crate) async fn execute(&self, sandbox: &Value, code: &str) -> Result<Vec<Value>, u16> {
        let response = self.begin(sandbox, code).await;
        if !response.status().is_success() {
            return Err(response.status().as_u16());
        }
        let text = response.text().await.unwrap();
        Ok(text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
    }

    /// The text of the value of code.
    pub(crate) async fn value(&self, sandbox: &Value, code: &str) -> String {
        let lines = self.execute(sandbox, code).await.unwrap();
        let result = lines.iter().find(|line| line["type"] == "result");
        result.unwrap_or_else(|| panic!("{lines:?}"))["text"].as_str().unwrap().to_owned()
    }
}

pub(crate) fn path(sandbox: &Value, rest: &str) -> String {
    format!("/sandboxes/{}{rest}", sandbox["sandboxID"].as_str().unwrap())
}

#[test]
fn checkpoints_rollbacks_forks_trees_and_differences() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut config = with(sandboxes(dir.path(), &script));
        config.admin = Some(config.addr);
        let server = serve(config).await;
        let client = Client::of(&server);
        let sandbox = client.create().await;
        client.execute(&sandbox, "var n = 1").await.unwrap();
        let one = client.post(&path(&sandbox, "/checkpoints"), json!({"name": "one"})).await;
        client.execute(&sandbox, "n = 2").await.unwrap();
        client.post(&path(&sandbox, "/checkpoints"), json!({"name": "two"})).await;
        client.execute(&sandbox, "n = 3").await.unwrap();
        for (to, n) in [("one", "1"), ("two", "2"), (one["checkpointID"].as_str().unwrap(), "1")] {
            client.post(&path(&sandbox, "/rollback"), json!({ "to": to })).await;
            assert_eq!(client.value(&sandbox, "n").await, n);
        }
        let forks = client.post(&path(&sandbox, "/fork"), json!({"count": 20})).await;
        let forks = forks.as_array().unwrap();
        assert_eq!(forks.len(), 20);
        for (number, fork) in forks.iter().enumerate() {
            let fork = &fork["sandbox"];
            assert_eq!(
                client.value(fork, &format!("n += {number}")).await,
                (1 + number).to_string()
            );
        }
        assert_eq!(client.value(&sandbox, "n").await, "1");
        // The status page has no script but its own, and nothing that reaches a sandbox.
        let page = client.http.get(server.operations("/status")).send().await.unwrap();
        assert!(
            page.headers()["content-security-policy"]
                .to_str()
                .unwrap()
                .starts_with("default-src 'none'")
        );
        let page = page.text().await.unwrap();
        assert!(!page.contains("src=") && !page.contains("https:"), "it loads something");
        let status = common::get(&client.http, &server.operations("/status.json")).await.1;
        let token = sandbox["envdAccessToken"].as_str().unwrap();
        let id = sandbox["sandboxID"].as_str().unwrap();
        let shown = &id[id.len() - 6..];
        assert!(!status.contains(token) && !status.contains(id) && status.contains(shown));
        let status: Value = serde_json::from_str(&status).unwrap();
        assert_eq!(status["sandboxes"]["live"], 21);
        let map = server.operations(&format!("/status/pages.json?sandbox={shown}"));
        let (code, map) = common::get(&client.http, &map).await;
        let map: Value = serde_json::from_str(&map).unwrap();
        let changed = map["changedPages"].as_u64().unwrap();
        assert!(code == 200 && changed > 0 && changed < map["pages"].as_u64().unwrap(), "{map}");
        let runs = map["runs"].as_array().unwrap();
        assert_eq!(runs.iter().map(|run| run[1].as_u64().unwrap()).sum::<u64>(), changed);
        for none in ["", "?sandbox=", "?sandbox=nobody"] {
            let url = server.operations(&format!("/status/pages.json{none}"));
            assert_eq!(common::get(&client.http, &url).await.0, 404, "{none}");
        }
        let (_, tree) = client.ask(Method::GET, &path(&sandbox, "/tree"), json!({})).await;
        let names: Vec<_> =
            tree["states"].as_array().unwrap().iter().filter_map(|s| s["name"].as_str()).collect();
        assert_eq!(names, ["one", "two"]);
        let (status, same) =
            client.ask(Method::GET, &path(&sandbox, "/diff?from=one&to=one"), json!({})).await;
        assert_eq!((status, &same["pages"]), (200, &json!(0)));
        let (_, differs) =
            client.ask(Method::GET, &path(&sandbox, "/diff?from=one&to=two"), json!({})).await;
        assert!(differs["bytes"].as_u64().unwrap() > 0, "{differs}");
        for (method, rest, body, status) in [
            (Method::POST, "/rollback", json!({"to": "three"}), 404),
            (Method::POST, "/rollback", json!({}), 400),
            (Method::POST, "/checkpoints", json!({"name": ""}), 400),
            (Method::POST, "/fork", json!({"count": 0}), 400),
            (Method::POST, "/fork", json!({"count": 1_000_000}), 400),
            (Method::DELETE, "/checkpoints/two", json!({}), 204),
            (Method::DELETE, "/checkpoints/two", json!({}), 404),
        ] {
            assert_eq!(client.ask(method, &path(&sandbox, rest), body).await.0, status, "{rest}");
        }
        server.end().await;
    });
}

#[test]
fn paused_idle_and_saved_sandboxes_come_back_also_in_another_process() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.idle_timeout = Duration::from_millis(50);
        let server = serve(with(sandboxes.clone())).await;
        let client = Client::of(&server);
        let (paused, idle) = (client.create().await, client.create().await);
        for sandbox in [&paused, &idle] {
            client
                .execute(sandbox, "var all = []; var add = (n) => all.push(n); add(1)")
                .await
                .unwrap();
        }
        assert_eq!(client.ask(Method::POST, &path(&paused, "/pause"), json!({})).await.0, 204);
        assert_eq!(client.ask(Method::POST, &path(&paused, "/pause"), json!({})).await.0, 409);
        assert_eq!(client.execute(&paused, "1").await, Err(502));
        // The idle one goes to the store by itself, and comes back with the next call, again and
        // again.
        for round in 2..5 {
            let saved = r#"afresh_sandboxes{place="saved"} 2"#;
            while !common::get(&client.http, &server.url("/metrics")).await.1.contains(saved) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            assert_eq!(
                client.value(&idle, &format!("add({round}); all.length")).await,
                round.to_string()
            );
        }
        let kept = client.post(&path(&idle, "/snapshots"), json!({"name": "kept"})).await;
        client.execute(&idle, "add('after')").await.unwrap();
        server.end().await;

        let server = serve(with(sandboxes)).await;
        let client = Client::of(&server);
        // An unpaused sandbox was saved when the server ended.
        assert_eq!(client.value(&idle, "all.length").await, "5");
        assert_eq!(client.execute(&paused, "1").await, Err(502));
        client.post(&path(&paused, "/connect"), json!({"timeout": 600})).await;
        assert_eq!(client.value(&paused, "all.length").await, "1");
        for name in ["kept", kept["snapshotID"].as_str().unwrap()] {
            let made = client.post("/sandboxes", json!({"templateID": name})).await;
            assert_eq!(client.value(&made, "all").await, "[ 1, 2, 3, 4 ]");
        }
        let (_, snapshots) = client.ask(Method::GET, "/snapshots", json!({})).await;
        assert_eq!(snapshots.as_array().unwrap().len(), 1);
        for status in [204, 404] {
            let deleted = client.ask(Method::DELETE, "/templates/kept", json!({})).await.0;
            assert_eq!(deleted, status);
        }
        for sandbox in [&paused, &idle] {
            assert_eq!(client.ask(Method::DELETE, &path(sandbox, ""), json!({})).await.0, 204);
            assert_eq!(client.ask(Method::DELETE, &path(sandbox, ""), json!({})).await.0, 404);
            assert_eq!(client.execute(sandbox, "1").await, Err(502));
        }
        server.end().await;
    });
}

#[test]
fn a_sandbox_ends_when_its_time_is_over() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let server = serve(with(sandboxes(dir.path(), &script))).await;
        let client = Client::of(&server);
        let short = client.post("/sandboxes", json!({"templateID": "script", "timeout": 1})).await;
        let kept = json!({"templateID": "script", "timeout": 600, "autoPause": true});
        let kept = client.post("/sandboxes", kept).await;
        let long = client.create().await;
        client.execute(&kept, "var n = 7").await.unwrap();
        client.post(&path(&kept, "/timeout"), json!({"timeout": 1})).await;
        loop {
            let (_, all) = client.ask(Method::GET, "/v2/sandboxes", json!({})).await;
            let states: Vec<_> = all
                .as_array()
                .unwrap()
                .iter()
                .map(|s| (s["sandboxID"].clone(), s["state"].clone()))
                .collect();
            let of = |sandbox: &Value| states.iter().find(|(id, _)| *id == sandbox["sandboxID"]);
            if of(&short).is_none() && of(&kept).is_some_and(|(_, state)| state == "paused") {
                assert_eq!(of(&long).unwrap().1, "running");
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        client.post(&path(&kept, "/connect"), json!({"timeout": 600})).await;
        assert_eq!(client.value(&kept, "n").await, "7");
        server.end().await;
    });
}

/// The ids in the store of sandboxes that begin with `kind`, and the ids of records in the folder
/// `records`.
fn stored_ids(dir: &Path, kind: &str, records: &str) -> (Vec<String>, Vec<String>) {
    let store = afresh::store::Store::open(dir.join("snapshots")).unwrap();
    let names = store.list().unwrap().into_iter().map(|listed| listed.tag.name);
    let mut stored: Vec<_> =
        names.filter_map(|name| Some(name.strip_prefix(kind)?.to_owned())).collect();
    let files = std::fs::read_dir(dir.join(records)).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "json"));
    let mut recorded: Vec<_> =
        files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    stored.sort();
    recorded.sort();
    (stored, recorded)
}

/// They go at every moment of a snapshot and of a pause.
#[test]
fn clients_that_go_away_leave_nothing_between_two_states() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.max_snapshots = 200;
        let server = serve(with(sandboxes)).await;
        let client = Client::of(&server);
        for round in 0..40 {
            let own = client.create().await;
            // Some megabytes to save.
            client.value(&own, "var all = new Uint8Array(4e6).fill(7); 1").await;
            for rest in ["/snapshots", "/pause"] {
                let to = path(&own, rest);
                let asked = client.ask(Method::POST, &to, json!({}));
                // The last one stays, however busy the machine is.
                let patience = if round == 39 {
                    common::TEST_TIMEOUT
                } else {
                    Duration::from_micros(500 * round)
                };
                let _ = tokio::time::timeout(patience, asked).await;
            }
        }
        // An operation in progress may be between two states: the result counts when it is stable.
        let (mut snapshots, mut paused) = Default::default();
        let mut settled = 0;
        for _ in 0..1200 {
            snapshots = stored_ids(dir.path(), "snap-", "records");
            paused = stored_ids(dir.path(), "sandbox-", "sandboxes");
            let whole = snapshots.0 == snapshots.1 && paused.0 == paused.1;
            settled = if whole { settled + 1 } else { 0 };
            if settled == 10 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(snapshots.0, snapshots.1, "snapshots and their records");
        assert_eq!(paused.0, paused.1, "sandboxes that were saved, and their records");
        assert!(!snapshots.0.is_empty() && !paused.0.is_empty(), "nobody went away late enough");
        server.end().await;
    });
}

#[test]
fn unnamed_snapshots_are_removed_while_the_server_runs() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.gc_interval = Duration::ZERO;
        let server = serve(with(sandboxes)).await;
        let client = Client::of(&server);
        let size = || {
            let blobs = std::fs::read_dir(dir.path().join("snapshots/blobs/sha256")).unwrap();
            // A file may go while it is looked at.
            blobs.map(|blob| blob.unwrap().metadata().map_or(0, |data| data.len())).sum::<u64>()
        };
        let own = client.create().await;
        // No page as another: those would be kept once.
        let all = "var all = new Uint8Array(4e6).map((_, i) => Math.imul(i, 2654435761) >>> 13); 1";
        client.value(&own, all).await;
        let byte = client.value(&own, "all[2345678]").await;
        let before = size();
        let kept = client.post(&path(&own, "/snapshots"), json!({"name": "kept"})).await;
        assert!(size() > before + 1_500_000, "{} after {before}", size());
        // A sandbox that depends on the snapshot about to be deleted.
        let heir = client.post("/v2/sandboxes", json!({"templateID": "kept"})).await;
        let kept = kept["snapshotID"].as_str().unwrap();
        assert_eq!(client.value(&heir, "all[2345678]").await, byte);
        let gone = client.ask(Method::DELETE, &format!("/templates/{kept}"), json!({})).await;
        assert_eq!(gone.0, 204, "{}", gone.1);
        for _ in 0..1200 {
            if size() < before + 500_000 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(size() < before + 500_000, "{} bytes are left of {before}", size());
        assert_eq!(client.value(&heir, "all[2345678]").await, byte);
        let (status, _) = client.ask(Method::POST, &path(&heir, "/pause"), json!({})).await;
        assert_eq!(status, 204);
        client.post(&path(&heir, "/connect"), json!({"timeout": 600})).await;
        assert_eq!(client.value(&heir, "all[2345678]").await, byte);
        server.end().await;
    });
}

#[test]
fn a_tenant_has_as_many_snapshots_as_it_may() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.max_snapshots = 2;
        let server = serve(with(sandboxes)).await;
        let mut client = Client::of(&server);
        let own = client.create().await;
        let snapshots = path(&own, "/snapshots");
        let first = client.post(&snapshots, json!({})).await;
        client.post(&snapshots, json!({"name": "second"})).await;
        let (status, answer) = client.ask(Method::POST, &snapshots, json!({})).await;
        assert_eq!(status, 429, "{answer}");
        assert!(answer["message"].as_str().unwrap().contains("`max-snapshots`"), "{answer}");
        // Those of another tenant are not counted.
        client.key = "key-of-other";
        let theirs = client.create().await;
        client.post(&path(&theirs, "/snapshots"), json!({})).await;
        client.key = KEY;
        let first = first["snapshotID"].as_str().unwrap();
        let gone = client.ask(Method::DELETE, &format!("/templates/{first}"), json!({})).await;
        assert_eq!(gone.0, 204, "{}", gone.1);
        client.post(&snapshots, json!({})).await;
        // Many at once are admitted no further.
        let second = client.create().await;
        client.ask(Method::DELETE, "/templates/second", json!({})).await;
        let mut asking = tokio::task::JoinSet::new();
        for number in 0..30 {
            let client = Client { http: client.http.clone(), base: client.base.clone(), key: KEY };
            let to = path(if number % 2 == 0 { &own } else { &second }, "/snapshots");
            asking.spawn(async move { client.ask(Method::POST, &to, json!({})).await.0 });
        }
        let made = asking.join_all().await.into_iter().filter(|status| *status == 201).count();
        assert_eq!(made, 1);
        let listed = client.ask(Method::GET, "/snapshots", json!({})).await.1;
        assert_eq!(listed.as_array().unwrap().len(), 2, "{listed}");
        server.end().await;
    });
}

#[test]
fn keys_and_tokens_are_asked_for_and_tenants_are_kept_apart() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.max_sandboxes = 3;
        let server = serve(with(sandboxes)).await;
        let mut client = Client::of(&server);
        let mut own = client.create().await;
        client.execute(&own, "var secret = 'canary'").await.unwrap();
        for key in ["", "wrong", "key-of-acm", "key-of-other"] {
            client.key = key;
            let expected = if key == "key-of-other" { 404 } else { 401 };
            for (method, rest) in [
                (Method::GET, ""),
                (Method::DELETE, ""),
                (Method::POST, "/pause"),
                (Method::POST, "/fork"),
                (Method::POST, "/snapshots"),
                (Method::GET, "/tree"),
            ] {
                let (status, answer) = client.ask(method, &path(&own, rest), json!({})).await;
                assert_eq!(status, expected, "{key} {rest}");
                assert!(answer["message"].is_string(), "{answer}");
            }
        }
        let (_, listed) = client.ask(Method::GET, "/v2/sandboxes", json!({})).await;
        assert_eq!(listed, json!([]));
        client.key = KEY;
        let token = own["envdAccessToken"].take();
        for wrong in [json!("wrong"), json!("")] {
            own["envdAccessToken"] = wrong;
            assert_eq!(client.execute(&own, "secret").await, Err(401));
        }
        own["envdAccessToken"] = token;
        assert_eq!(client.value(&own, "secret").await, "\"canary\"");
        // One too many, alone or as forks.
        client.create().await;
        let (status, _) = client.ask(Method::POST, &path(&own, "/fork"), json!({"count": 2})).await;
        assert_eq!(status, 429);
        client.create().await;
        let (status, _) =
            client.ask(Method::POST, "/sandboxes", json!({"templateID": "script"})).await;
        assert_eq!(status, 429);
        for (body, expected) in [
            (json!([]), 400),
            (json!({"timeout": "x"}), 400),
            (json!({"templateID": "script", "colour": "red"}), 400),
            (json!({"templateID": "script", "secure": false}), 400),
            (json!({"templateID": "script", "mcp": {"server": {}}}), 400),
            (json!({"templateID": "script", "volumeMounts": [{}]}), 400),
            (json!({"templateID": "script", "network": {"allowOut": ["10.0.0.1"]}}), 400),
            (json!({"templateID": "script", "network": {"maskRequestHost": "a b"}}), 400),
            (json!({"templateID": "script", "envVars": {"A": "b"}}), 400),
            (json!({"templateID": "scripts"}), 404),
        ] {
            let (status, said) = client.ask(Method::POST, "/sandboxes", body.clone()).await;
            assert_eq!(status, expected, "{body}: {said}");
        }
        let (status, _) =
            client.ask(Method::POST, &path(&own, "/snapshots"), json!({"memory": false})).await;
        assert_eq!(status, 400);
        for query in ["colour=red", "state=gone", "order=up", "limit=0", "nextToken=x"] {
            let (status, _) =
                client.ask(Method::GET, &format!("/v2/sandboxes?{query}"), json!({})).await;
            assert_eq!(status, 400, "{query}");
        }
        assert_eq!(client.ask(Method::GET, "/sandboxes/x/nothing", json!({})).await.0, 404);
        server.end().await;
    });
}

#[test]
fn extensions_match_their_openapi_description() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let server = serve(with(sandboxes(dir.path(), &script))).await;
        let client = Client::of(&server);
        let sandbox = client.create().await;
        let (_, doc) = client.ask(Method::GET, "/openapi.json", json!({})).await;
        let paths = doc["paths"].as_object().expect("it describes paths");
        assert!(paths.len() >= 6);
        client.post(&path(&sandbox, "/checkpoints"), json!({"name": "a"})).await;
        let mut seen = 0;
        for (template, operations) in paths {
            for (method, operation) in operations.as_object().unwrap() {
                let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
                let mut target = template.replace("{checkpoint}", "a");
                target = target.replace("{id}", sandbox["sandboxID"].as_str().unwrap());
                if target.ends_with("/diff") {
                    target.push_str("?from=a&to=a");
                }
                let body = json!({"name": "b", "to": "a", "count": 1});
                // The one that takes the checkpoint away comes last.
                let (status, answer) = match method {
                    Method::DELETE => continue,
                    _ => client.ask(method.clone(), &target, body).await,
                };
                let described = &operation["responses"][status.to_string()];
                assert!(described.is_object(), "{method} {template} answered {status}: {answer}");
                assert!(status < 300, "{method} {template}: {answer}");
                let schema = &described["content"]["application/json"]["schema"];
                for needed in schema["required"].as_array().into_iter().flatten() {
                    assert!(answer.get(needed.as_str().unwrap()).is_some(), "{template}: {answer}");
                }
                seen += 1;
                if operation["security"] != json!([]) {
                    let none = client.http.request(method, format!("{}{target}", client.base));
                    assert_eq!(none.send().await.unwrap().status(), 401, "{template}");
                    assert!(operation["responses"]["401"].is_object());
                }
            }
        }
        assert!(seen >= 6);
        let (status, _) =
            client.ask(Method::DELETE, &path(&sandbox, "/checkpoints/a"), json!({})).await;
        assert_eq!(status, 204);
        server.end().await;
    });
}

#[test]
fn unread_files_and_long_labels_are_bounded() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut config = with(sandboxes(dir.path(), &script));
        config.max_buffered_bytes = 64 << 20;
        let server = serve(config).await;
        let client = Client::of(&server);
        let sandbox = client.create().await;
        let named = ["sandboxID", "envdAccessToken"].map(|name| sandbox[name].as_str().unwrap());
        let files = server.url("/files?path=/large");
        let ask = |method| {
            let request = client.http.request(method, &files);
            request.header("e2b-sandbox-id", named[0]).header("x-access-token", named[1])
        };
        let put = ask(Method::POST).body(vec![b'x'; 24 << 20]).send().await.unwrap();
        assert_eq!(put.status(), 200);
        // Answers whose bodies are not read: of each a piece is in memory.
        let mut slow = Vec::new();
        for _ in 0..20 {
            slow.push(ask(Method::GET).send().await.unwrap());
        }
        assert!(slow.iter().all(|answer| answer.status() == 200));
        let taken = ask(Method::GET).send().await.unwrap();
        assert_eq!(taken.content_length(), Some(24 << 20));
        assert_eq!(taken.bytes().await.unwrap().len(), 24 << 20);
        drop(slow);
        // The record of each sandbox is small, for any name by its client.
        let long = "x".repeat(20 << 10);
        for (path, body) in [
            ("/sandboxes".to_owned(), json!({"templateID": "script", "metadata": {"a": long}})),
            // As JSON, each of these bytes takes six.
            ("/sandboxes".to_owned(), json!({"metadata": {"a": "\u{1}".repeat(4 << 10)}})),
            (path(&sandbox, "/checkpoints"), json!({ "name": long })),
            (path(&sandbox, "/snapshots"), json!({ "name": long })),
        ] {
            let (status, said) = client.ask(Method::POST, &path, body).await;
            assert_eq!(status, 400, "{path}: {said}");
        }
        server.end().await;
    });
}
