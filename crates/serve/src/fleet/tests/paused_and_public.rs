//! Requests into paused and public sandboxes, on the host that has them and on another.

use reqwest::{Client, Method};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::NatsServer;
use crate::sandbox::{Keys, tests};
use crate::{Config, Handle, Server};

/// A host of a fleet, with the guest of the tests of sandboxes.
struct Host {
    base: String,
    handle: Handle,
    running: tokio::task::JoinHandle<bool>,
    _dir: TempDir,
}

impl Host {
    async fn start(nats: &NatsServer, store: &TempDir) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut sandboxes = tests::config(&dir);
        sandboxes.keys = Keys::new([("acme", "key")]);
        let mut fleet = nats.config();
        fleet.store = Some(store.path().to_str().unwrap().to_owned());
        let mut config = Config { sandboxes: Some(sandboxes), ..Config::default() };
        config.fleet = Some(fleet);
        config.addr.set_port(0);
        let server = Server::bind(config).await.unwrap();
        let (base, handle) = (format!("http://{}", server.addr()), server.handle());
        Self { base, handle, running: tokio::spawn(server.run()), _dir: dir }
    }

    /// Asks with these headers; the status and the answer.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        headers: &[(&'static str, &str)],
        body: Value,
    ) -> (u16, Value) {
        let client = Client::builder().no_proxy().build().unwrap();
        let mut request = client.request(method, format!("{}{path}", self.base));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.body(body.to_string()).send().await.unwrap();
        let status = response.status().as_u16();
        (status, serde_json::from_str(&response.text().await.unwrap()).unwrap_or_default())
    }

    async fn end(self) {
        self.handle.shutdown();
        assert!(self.running.await.unwrap());
    }
}

const KEY: (&str, &str) = ("x-api-key", "key");

/// Makes a sandbox on a host; its id and its token.
async fn make(host: &Host, options: Value) -> [String; 2] {
    let (status, made) = host.ask(Method::POST, "/sandboxes", &[KEY], options).await;
    assert_eq!(status, 201, "{made}");
    ["sandboxID", "envdAccessToken"].map(|name| made[name].as_str().unwrap().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_resumes_a_paused_sandbox_through_each_host() {
    let Some(nats) = NatsServer::start() else { return };
    let store = tempfile::tempdir().unwrap();
    let hosts = [Host::start(&nats, &store).await, Host::start(&nats, &store).await];
    for resumes in [true, false] {
        let options = json!({"templateID": "logger", "autoResume": {"enabled": resumes}});
        let [id, token] = make(&hosts[0], options).await;
        for host in &hosts {
            let pause = format!("/sandboxes/{id}/pause");
            let (status, answer) = host.ask(Method::POST, &pause, &[KEY], json!({})).await;
            assert!(status == 204 || !resumes && status == 409, "{answer}");
            let run = async |token: &str| {
                let headers = [("e2b-sandbox-id", id.as_str()), ("x-access-token", token)];
                host.ask(Method::POST, "/execute", &headers, json!({"code": "a"})).await
            };
            assert_eq!(run("wrong").await.0, if resumes { 401 } else { 502 });
            let (status, answer) = run(&token).await;
            assert_eq!(status, if resumes { 200 } else { 502 }, "{answer}");
        }
    }
    for host in hosts {
        host.end().await;
    }
}

#[cfg(linux_guests)]
#[tokio::test(flavor = "multi_thread")]
async fn a_public_port_needs_no_token_on_any_host() {
    let Some(nats) = NatsServer::start() else { return };
    let store = tempfile::tempdir().unwrap();
    let hosts = [Host::start(&nats, &store).await, Host::start(&nats, &store).await];
    for public in [true, false] {
        let network = json!({"allowPublicTraffic": public});
        let options = json!({"templateID": "logger", "network": network});
        let [id, _] = make(&hosts[0], options).await;
        for host in &hosts {
            let port = [("e2b-sandbox-id", id.as_str()), ("e2b-sandbox-port", "8000")];
            let (status, answer) = host.ask(Method::GET, "/", &port, json!({})).await;
            // Nothing listens there.
            assert_eq!(status, if public { 502 } else { 403 }, "{answer}");
            // The rest of the sandbox is not public.
            let inside = &port[..1];
            let (status, _) = host.ask(Method::GET, "/contexts", inside, json!({})).await;
            assert_eq!(status, 401);
        }
    }
    for host in hosts {
        host.end().await;
    }
}
