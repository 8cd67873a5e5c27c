//! Sandboxes of a server whose disk is full: clients learn the cause, and nothing that was
//! acknowledged is lost.

use std::time::Duration;

use crate::common::{built, run, scratch, serve};
use crate::sandbox::{Client, path, sandboxes, with};
use crate::small_disk::SmallDisk;
use reqwest::Method;
use serde_json::{Value, json};

/// The refusal of an operation that has to write.
async fn full(client: &Client, at: &str) {
    let (status, why) = client.ask(Method::POST, at, json!({})).await;
    assert_eq!(status, 507, "{at}: {why}");
    let message = why["message"].as_str().unwrap();
    assert!(message.contains("disk") && message.contains("full"), "{message}");
}

#[test]
fn a_full_disk_is_named_to_clients_and_sandboxes_stay_usable() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    let Some(disk) = SmallDisk::mount(dir.path(), 96) else { return };
    run(async {
        let config = with(sandboxes(dir.path(), &script));
        let server = serve(config.clone()).await;
        let client = Client::of(&server);
        let own = client.create().await;
        // No page as another: those would be kept once.
        let all = "var all = new Uint8Array(4e6).map((_, i) => Math.imul(i, 2654435761) >>> 13); 1";
        client.value(&own, all).await;
        let byte = client.value(&own, "all[2345678]").await;
        let state = async |sandbox: &Value| {
            let (_, listed) = client.ask(Method::GET, "/v2/sandboxes", json!({})).await;
            let listed = listed.as_array().unwrap().clone();
            let found = listed.into_iter().find(|one| one["sandboxID"] == sandbox["sandboxID"]);
            found.unwrap()["state"].as_str().unwrap().to_owned()
        };
        // Without room for the pages, and then for the record alone.
        for free in [0, 64 << 10, 1 << 20] {
            disk.fill(free);
            for rest in ["/pause", "/snapshots"] {
                full(&client, &path(&own, rest)).await;
            }
            assert_eq!(state(&own).await, "running");
            assert_eq!(client.value(&own, "all[2345678]").await, byte);
            assert_eq!(client.ask(Method::GET, "/snapshots", json!({})).await.1, json!([]));
            let new = client.create().await;
            assert_eq!(client.value(&new, "6 * 7").await, "42");
            let end = client.ask(Method::DELETE, &path(&new, ""), json!({})).await;
            assert_eq!(end.0, 204);
            disk.empty();
        }
        let paused = client.ask(Method::POST, &path(&own, "/pause"), json!({})).await;
        assert_eq!(paused.0, 204);
        // A paused sandbox is opened from a full disk.
        disk.fill(0);
        let to = path(&own, "/connect");
        let (status, why) = client.ask(Method::POST, &to, json!({"timeout": 600})).await;
        assert!(status == 201 || status == 507, "{status} {why}");
        disk.empty();
        client.post(&to, json!({"timeout": 600})).await;
        assert_eq!(client.value(&own, "all[2345678]").await, byte);
        client.value(&own, "var more = 7; 1").await;

        // A server that ends waits for room.
        disk.fill(0);
        let ending = tokio::spawn(server.end());
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(!ending.is_finished(), "its sandboxes are not saved");
        disk.empty();
        ending.await.unwrap();
        let server = serve(config).await;
        let client = Client::of(&server);
        assert_eq!(client.value(&own, "more").await, "7");
        assert_eq!(client.value(&own, "all[2345678]").await, byte);
        server.end().await;
    });
}
