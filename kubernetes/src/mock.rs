//! A Kubernetes API and an afresh server for tests, in this process and over HTTP on loopback.

mod afresh;
mod cluster;
mod http;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

pub(crate) use afresh::{Faults, MockAfresh};
pub(crate) use cluster::MockCluster;

use crate::condition::{self, READY};
use crate::context::{Context, Settings};
use crate::controller::reconcile_all;
use crate::health::Monitor;
use crate::lease::LeaseHolder;
use crate::resource::{CustomObject, Kind, Sandbox, SandboxKind};
use crate::server::Server;

/// The name of objects whose work panics.
pub(crate) const PLANTED_PANIC: &str = "planted-panic";
/// How long a test waits for anything.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Waits until something is there.
pub(crate) async fn wait_for<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let found = tokio::time::timeout(WAIT_TIMEOUT, found).await;
    found.unwrap_or_else(|_| panic!("{what} did not happen"))
}

/// The specification of a `Sandbox` or a `SandboxTemplate` of the template `script`.
pub(crate) fn script() -> Value {
    let container = json!({"name": "main", "image": "script"});
    json!({"podTemplate": {"spec": {"runtimeClassName": "afresh", "containers": [container]}}})
}

/// Both servers.
pub(crate) struct World {
    pub(crate) cluster: Arc<MockCluster>,
    pub(crate) afresh: Arc<MockAfresh>,
    pub(crate) settings: Settings,
    key: tempfile::NamedTempFile,
    kube_port: u16,
    afresh_port: u16,
}

impl World {
    pub(crate) async fn new() -> Self {
        // Only a second one in this process fails, which uses the first.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let (cluster, afresh) = (Arc::new(MockCluster::default()), Arc::new(MockAfresh::default()));
        let kube_port = http::serve(cluster.clone()).await;
        let afresh_port = http::serve(afresh.clone()).await;
        let key = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(key.path(), "key").expect("it is written");
        let settings = Settings {
            controller: "default/one".to_owned(),
            public_url: format!("http://127.0.0.1:{afresh_port}").parse().expect("a URL"),
            domain: None,
            namespace: None,
            ignore_other_runtimes: false,
            images: Vec::new(),
            keep: Duration::from_secs(3600),
            resync: Duration::from_millis(50),
            sweep: Duration::from_secs(3600),
            orphan_age: Duration::ZERO,
            confirmation: Duration::from_millis(200),
        };
        Self { cluster, afresh, settings, key, kube_port, afresh_port }
    }

    pub(crate) fn client(&self) -> kube::Client {
        let url = format!("http://127.0.0.1:{}", self.kube_port);
        let config = kube::Config::new(url.parse().expect("a URL"));
        kube::Client::try_from(config).expect("a client")
    }

    pub(crate) fn server(&self) -> Server {
        let url = format!("http://127.0.0.1:{}", self.afresh_port).parse().expect("a URL");
        Server::new(url, self.key.path().to_owned()).expect("a client")
    }

    /// A controller that holds the lease.
    pub(crate) async fn context(&self) -> Arc<Context> {
        self.context_of(&self.settings.controller, self.settings.clone()).await
    }

    /// A controller with an identity.
    pub(crate) async fn context_of(&self, identity: &str, settings: Settings) -> Arc<Context> {
        let name = settings.controller.replace('/', "-");
        let monitor = Arc::new(Monitor::default());
        let (client, identity) = (self.client(), identity.to_owned());
        let holder = LeaseHolder::new(client, "default", &name, identity, monitor.clone());
        holder.acquire().await.expect("the lease is free");
        let (cluster, holder) = ("cluster".to_owned(), Arc::new(holder));
        let (client, server) = (self.client(), self.server());
        Arc::new(Context::new(client, server, settings, cluster, holder, monitor))
    }

    /// Runs a controller until the handle is aborted.
    pub(crate) fn run(context: &Arc<Context>) -> AbortOnDrop {
        AbortOnDrop(tokio::spawn(reconcile_all(context.clone(), std::future::pending())))
    }

    /// Adds an object.
    pub(crate) fn add<K: Kind>(&self, namespace: &str, name: &str, spec: Value) {
        self.cluster.add(K::PLURAL, namespace, name, json!({"spec": spec}));
    }

    /// The object as the controller reads it.
    pub(crate) fn object<K: Kind>(&self, namespace: &str, name: &str) -> Option<CustomObject<K>>
    where
        CustomObject<K>: kube::Resource<Scope = NamespaceResourceScope>,
    {
        let value = self.cluster.get(K::PLURAL, namespace, name)?;
        Some(serde_json::from_str(&value.to_string()).expect("any object decodes"))
    }

    /// Waits until `Ready` of a `Sandbox` has a reason.
    pub(crate) async fn sandbox_reason(
        &self,
        namespace: &str,
        name: &str,
        reason: &str,
    ) -> Sandbox {
        let what = format!("{reason} of {namespace}/{name}");
        wait_for(&what, async || {
            let found = self.object::<SandboxKind>(namespace, name)?;
            let conditions = found.status().conditions;
            (condition::find(&conditions, READY)?.reason == reason).then_some(found)
        })
        .await
    }
}

/// A task that ends with the test.
pub(crate) struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
