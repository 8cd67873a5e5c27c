//! The Kubernetes API: objects with versions, pages, watches, merge patches, finalizers and leases.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::http::{Handler, Reply, Request};

/// The plural name of a kind, a namespace and a name.
type Place = (String, String, String);

#[derive(Default)]
struct State {
    objects: BTreeMap<Place, Value>,
    version: u64,
    log: Vec<(u64, String, Value)>,
    watches: Vec<(String, UnboundedSender<String>)>,
    requests: Vec<String>,
    is_down: bool,
}

/// The API.
#[derive(Default)]
pub(crate) struct MockCluster(Mutex<State>);

fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (name, value) in patch {
        if value.is_null() {
            into.as_object_mut().expect("an object").remove(name);
        } else {
            merge(&mut into[name], value);
        }
    }
}

fn refusal(status: u16, reason: &str) -> Reply {
    Reply::Json(
        status,
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason,
            "message": reason, "code": status}),
    )
}

impl State {
    /// Stores an object, or removes one without finalizers that is deleted, and sends an event.
    fn store(&mut self, place: Place, mut object: Value, mut event: &str) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let metadata = &object["metadata"];
        let is_held = metadata["finalizers"].as_array().is_some_and(|all| !all.is_empty());
        if metadata.get("deletionTimestamp").is_some() && !is_held {
            event = "DELETED";
            self.objects.remove(&place);
        } else {
            self.objects.insert(place.clone(), object.clone());
        }
        let event = json!({"type": event, "object": object});
        self.watches.retain(|(plural, watch)| {
            // The tag is first, as in the API.
            *plural != place.0 || watch.send(line(&event)).is_ok()
        });
        self.log.push((self.version, place.0, event));
        object
    }

    fn create(&mut self, place: Place, mut object: Value) -> Reply {
        if self.objects.contains_key(&place) {
            return refusal(409, "AlreadyExists");
        }
        object["metadata"]["name"] = place.2.clone().into();
        object["metadata"]["namespace"] = place.1.clone().into();
        object["metadata"]["uid"] = format!("uid-{}", self.version + 1).into();
        object["metadata"]["generation"] = 1.into();
        Reply::Json(201, self.store(place, object, "ADDED"))
    }

    fn patch(&mut self, place: Place, patch: &Value) -> Reply {
        let Some(before) = self.objects.get(&place) else { return refusal(404, "NotFound") };
        let mut object = before.clone();
        for field in ["resourceVersion", "uid"] {
            let wanted = patch["metadata"].get(field);
            if wanted.is_some_and(|wanted| *wanted != object["metadata"][field]) {
                return refusal(409, "Conflict");
            }
        }
        merge(&mut object, patch);
        if object == *before {
            return Reply::Json(200, object);
        }
        if object["spec"] != before["spec"] {
            let generation = object["metadata"]["generation"].as_i64().unwrap_or_default();
            object["metadata"]["generation"] = (generation + 1).into();
        }
        Reply::Json(200, self.store(place, object, "MODIFIED"))
    }

    fn list(&self, plural: &str, namespace: Option<&str>, request: &Request) -> Reply {
        let number = |text: &str| text.parse::<usize>().ok();
        // The version of the first page, from which a watch begins.
        let token = request.query.get("continue").and_then(|token| token.split_once(':'));
        let (start, version) = token.map_or((0, self.version.to_string()), |(start, version)| {
            (number(start).expect("a number"), version.to_owned())
        });
        let limit = request.query.get("limit").and_then(|limit| number(limit));
        let end = start + limit.unwrap_or(usize::MAX / 2);
        let own = |place: &Place| namespace.is_none_or(|own| place.1 == own);
        let from = (plural.to_owned(), String::new(), String::new());
        let mut all = self
            .objects
            .range(from..)
            .take_while(|(place, _)| place.0 == plural)
            .filter(|(place, _)| own(place))
            .skip(start);
        let items: Vec<Value> =
            all.by_ref().take(end - start).map(|(_, object)| object.clone()).collect();
        let token = all.next().map(|_| format!("{end}:{version}")).unwrap_or_default();
        let metadata = json!({"resourceVersion": version, "continue": token});
        let list =
            json!({"apiVersion": "v1", "kind": "List", "metadata": metadata, "items": items});
        Reply::Json(200, list)
    }

    fn watch(&mut self, plural: &str, request: &Request) -> Reply {
        let from: u64 = request.query.get("resourceVersion").map_or(0, |v| v.parse().unwrap_or(0));
        let (sender, receiver) = unbounded_channel();
        for (version, of, event) in &self.log {
            if *version > from && of == plural {
                sender.send(line(event)).expect("the receiver lives");
            }
        }
        self.watches.push((plural.to_owned(), sender));
        Reply::Lines(receiver)
    }
}

fn line(event: &Value) -> String {
    format!(r#"{{"type":{},"object":{}}}"#, event["type"], event["object"])
}

impl MockCluster {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no test panicked with it")
    }

    /// Adds an object.
    pub(crate) fn add(&self, plural: &str, namespace: &str, name: &str, object: Value) {
        let place = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        assert!(matches!(self.state().create(place, object), Reply::Json(201, _)));
    }

    /// Changes an object as a user does.
    pub(crate) fn patch(&self, plural: &str, namespace: &str, name: &str, patch: &Value) {
        let place = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        assert!(matches!(self.state().patch(place, patch), Reply::Json(200, _)));
    }

    /// Deletes an object, which its finalizers keep.
    pub(crate) fn delete(&self, plural: &str, namespace: &str, name: &str) {
        let deleted = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
        self.patch(plural, namespace, name, &deleted);
    }

    /// Removes an object whatever its finalizers are.
    pub(crate) fn remove(&self, plural: &str, namespace: &str, name: &str) {
        let place = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        self.state().objects.remove(&place);
    }

    /// An object.
    pub(crate) fn get(&self, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        let place = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        self.state().objects.get(&place).cloned()
    }

    /// The names of all objects of a kind in a namespace.
    pub(crate) fn names(&self, plural: &str, namespace: &str) -> Vec<String> {
        let state = self.state();
        let own = state.objects.keys().filter(|place| place.0 == plural && place.1 == namespace);
        own.map(|place| place.2.clone()).collect()
    }

    /// Whether every request is refused.
    pub(crate) fn set_down(&self, is_down: bool) {
        self.state().is_down = is_down;
    }

    /// Method and path of every request so far.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.state().requests.clone()
    }
}

impl Handler for MockCluster {
    async fn answer(&self, request: Request) -> Reply {
        let mut state = self.state();
        state.requests.push(format!("{} /{}", request.method, request.path.join("/")));
        if state.is_down {
            return refusal(503, "ServiceUnavailable");
        }
        let path: Vec<&str> = request.path.iter().map(String::as_str).collect();
        let rest = match path[..] {
            ["apis", _, _, ref rest @ ..] | ["api", _, ref rest @ ..] => rest,
            _ => return refusal(404, "NotFound"),
        };
        let (plural, namespace, name) = match *rest {
            ["namespaces", namespace, plural] => (plural, Some(namespace), None),
            ["namespaces", namespace, plural, name] => (plural, Some(namespace), Some(name)),
            ["namespaces", namespace, plural, name, "status"] => {
                (plural, Some(namespace), Some(name))
            }
            ["namespaces", name] => ("namespaces", None, Some(name)),
            [plural] => (plural, None, None),
            _ => return refusal(404, "NotFound"),
        };
        let place = |name: &str| {
            (plural.to_owned(), namespace.unwrap_or_default().to_owned(), name.to_owned())
        };
        match (request.method.as_str(), name) {
            ("GET", None) if request.query.contains_key("watch") => state.watch(plural, &request),
            ("GET", None) => state.list(plural, namespace, &request),
            ("GET", Some(name)) => match state.objects.get(&place(name)) {
                Some(object) => Reply::Json(200, object.clone()),
                None => refusal(404, "NotFound"),
            },
            ("POST", None) => {
                let name = request.body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
                state.create(place(&name), request.body)
            }
            ("PATCH", Some(name)) => state.patch(place(name), &request.body),
            ("PUT", Some(name)) => state.patch(place(name), &request.body),
            ("DELETE", Some(name)) => {
                let deleted = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
                state.patch(place(name), &deleted)
            }
            _ => refusal(405, "MethodNotAllowed"),
        }
    }
}
