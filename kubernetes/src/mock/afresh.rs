//! The sandboxes of `afresh serve`, with faults on request.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::http::{Handler, Reply, Request};

#[derive(Default)]
pub(super) struct State {
    sandboxes: BTreeMap<String, Value>,
    count: usize,
    requests: Vec<String>,
    faults: Faults,
    /// Sandboxes that appear with the next creation.
    hidden: Vec<(String, Value)>,
    /// Sandboxes by the keys of their creations, and the requests without their times.
    keys: BTreeMap<String, (String, Value)>,
}

/// Faults of the server.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// Every request for one sandbox gets the 404 of a proxy.
    pub(crate) proxy: bool,
    /// Every request for one sandbox gets the server's own 404.
    pub(crate) forgetful: bool,
    /// Lists are empty, as those of another tenant.
    pub(crate) empty: bool,
    /// Lists lack an entry.
    pub(crate) partial: bool,
    /// No sandbox can be paused.
    pub(crate) restless: bool,
    /// The tenant of the key; `acme` if none.
    pub(crate) tenant: Option<&'static str>,
    /// There are no templates.
    pub(crate) bare: bool,
    /// Sandboxes that cannot be ended.
    pub(crate) immortal: BTreeSet<String>,
    /// The number of creations whose answers are lost. Lists do not have their sandboxes before the
    /// next creation.
    pub(crate) lost_answers: usize,
    /// Time that a creation takes, by the namespace of the sandbox.
    pub(crate) slow: BTreeMap<String, Duration>,
}

/// The server. It has the template `script`, and the build `script:one`.
#[derive(Default)]
pub(crate) struct MockAfresh(Mutex<State>);

fn refusal(status: u16, message: &str) -> Reply {
    Reply::Json(status, json!({"code": status, "message": message}))
}

impl MockAfresh {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no test panicked with it")
    }

    /// Makes a sandbox with labels: its identifier.
    pub(crate) fn make(&self, metadata: &[(&str, &str)]) -> String {
        let metadata: BTreeMap<&str, &str> = metadata.iter().copied().collect();
        self.state().make(&json!({"metadata": metadata, "timeout": 3600}))
    }

    /// The number of sandboxes that were ever made.
    pub(crate) fn creations(&self) -> usize {
        self.state().count
    }

    /// The identifiers of all sandboxes.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.state().sandboxes.keys().cloned().collect()
    }

    /// A sandbox.
    pub(crate) fn get(&self, id: &str) -> Option<Value> {
        self.state().sandboxes.get(id).cloned()
    }

    /// Makes a sandbox that is in no list before the next creation: its identifier.
    pub(crate) fn make_hidden_until_creation(&self, metadata: &[(&str, &str)]) -> String {
        let id = self.make(metadata);
        let mut state = self.state();
        let sandbox = state.sandboxes.remove(&id).expect("it was made");
        state.hidden.push((id.clone(), sandbox));
        id
    }

    /// Adds a sandbox again.
    pub(crate) fn put(&self, id: &str, sandbox: Value) {
        self.state().sandboxes.insert(id.to_owned(), sandbox);
    }

    /// Removes a sandbox.
    pub(crate) fn remove(&self, id: &str) {
        self.state().sandboxes.remove(id);
    }

    /// Sets the time that a sandbox has left.
    pub(crate) fn set_time_left(&self, id: &str, seconds: i64) {
        let end = Timestamp::now() + SignedDuration::from_secs(seconds);
        let mut state = self.state();
        state.sandboxes.get_mut(id).expect("it exists")["endAt"] = end.to_string().into();
    }

    /// Replaces the faults.
    pub(crate) fn fail(&self, faults: Faults) {
        self.state().faults = faults;
    }

    /// Method and path of every request so far.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.state().requests.clone()
    }
}

impl State {
    fn make(&mut self, body: &Value) -> String {
        self.count += 1;
        let id = format!("sandbox{:05}", self.count);
        let seconds = body["timeout"].as_i64().unwrap_or_default();
        let now = Timestamp::now();
        let sandbox = json!({
            "sandboxID": id, "envdAccessToken": format!("token-of-{id}"), "state": "running",
            "startedAt": now.to_string(), "metadata": body["metadata"],
            "endAt": (now + SignedDuration::from_secs(seconds)).to_string(),
            "templateID": body["templateID"],
        });
        self.sandboxes.insert(id.clone(), sandbox);
        id
    }

    fn has_template(&self, name: Option<&str>) -> bool {
        !self.faults.bare && matches!(name, Some("script" | "script:one"))
    }

    fn list(&self, labels: &str) -> Reply {
        let (label, value) = labels.split_once('=').expect("one label");
        let all = self.sandboxes.values().filter(|sandbox| sandbox["metadata"][label] == value);
        let all = all.filter(|_| !self.faults.empty).cloned().collect();
        match self.faults.partial {
            true => Reply::Partial(all),
            false => Reply::Json(200, all),
        }
    }

    fn one(&mut self, method: &str, id: &str, action: Option<&str>, body: &Value) -> Reply {
        if self.faults.proxy {
            return Reply::Html(404);
        }
        let missing = format!("the sandbox {id} was not found");
        let is_restless = self.faults.restless;
        let is_immortal = self.faults.immortal.contains(id);
        let found = self.sandboxes.get_mut(id).filter(|_| !self.faults.forgetful);
        let Some(sandbox) = found else { return refusal(404, &missing) };
        let end = || {
            let seconds = body["timeout"].as_i64().expect("a time");
            json!((Timestamp::now() + SignedDuration::from_secs(seconds)).to_string())
        };
        match (method, action) {
            ("GET", None) => return Reply::Json(200, sandbox.clone()),
            ("DELETE", None) if is_immortal => return refusal(500, "it cannot be ended"),
            ("DELETE", None) => drop(self.sandboxes.remove(id)),
            ("POST", Some("pause")) if is_restless => {
                return refusal(409, "the template that it began in has changed");
            }
            ("POST", Some("pause")) if sandbox["state"] == "paused" => {
                return refusal(409, "it is paused already");
            }
            ("POST", Some("pause")) => sandbox["state"] = "paused".into(),
            ("POST", Some("connect")) => {
                sandbox["state"] = "running".into();
                sandbox["endAt"] = end();
            }
            ("POST", Some("timeout")) => sandbox["endAt"] = end(),
            _ => return refusal(405, "there is no such route"),
        }
        Reply::Json(200, json!({}))
    }
}

impl Handler for MockAfresh {
    async fn answer(&self, request: Request) -> Reply {
        let path: Vec<&str> = request.path.iter().map(String::as_str).collect();
        let method = request.method.as_str();
        let slow = {
            let mut state = self.state();
            state.requests.push(format!("{method} /{}", request.path.join("/")));
            let namespace = request.body["metadata"]["kubernetes-namespace"].as_str();
            namespace.and_then(|namespace| state.faults.slow.get(namespace).copied())
        };
        if let Some(slow) = slow {
            tokio::time::sleep(slow).await;
        }
        let mut state = self.state();
        match (method, &path[..]) {
            ("GET", ["v2", "sandboxes"]) => state.list(&request.query["metadata"]),
            ("POST", ["sandboxes"])
                if request.body["templateOnly"] == true
                    && !state.has_template(request.body["templateID"].as_str()) =>
            {
                let name = &request.body["templateID"];
                refusal(404, &format!("there is no template {name}"))
            }
            ("POST", ["sandboxes"]) => {
                let hidden = std::mem::take(&mut state.hidden);
                state.sandboxes.extend(hidden);
                let mut wanted = request.body.clone();
                if let Some(fields) = wanted.as_object_mut() {
                    fields.remove("timeout");
                }
                let known = request.key.as_ref().and_then(|key| state.keys.get(key));
                if let Some((id, body)) = known
                    && let Some(sandbox) = state.sandboxes.get(id)
                {
                    return match *body == wanted {
                        true => Reply::Json(201, sandbox.clone()),
                        false => refusal(422, "the key is that of another request"),
                    };
                }
                let id = state.make(&request.body);
                state.keys.extend(request.key.map(|key| (key, (id.clone(), wanted))));
                let sandbox = state.sandboxes[&id].clone();
                if state.faults.lost_answers > 0 {
                    state.faults.lost_answers -= 1;
                    state.sandboxes.remove(&id);
                    state.hidden.push((id, sandbox));
                    return Reply::Html(502);
                }
                Reply::Json(201, sandbox)
            }
            (_, ["sandboxes", id]) => state.one(method, id, None, &request.body),
            (_, ["sandboxes", id, action]) => state.one(method, id, Some(action), &request.body),
            ("GET", ["templates", "aliases", name]) => match state.has_template(Some(name)) {
                true => Reply::Json(200, json!({})),
                false => refusal(404, &format!("the template {name} was not found")),
            },
            ("GET", ["usage"]) => {
                Reply::Json(200, json!({"tenant": state.faults.tenant.unwrap_or("acme")}))
            }
            _ => refusal(404, "there is no such route"),
        }
    }
}
