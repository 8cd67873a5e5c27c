//! A cluster for tests: etcd, kube-apiserver, the definitions, the rights of the controller, and an
//! afresh server. Tests share it, and each has its own namespace.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Weak};

use afresh_kube::condition;
use afresh_kube::context::Settings;
use afresh_kube::controller::{LeaseSettings, run};
use afresh_kube::resource::{
    ClaimKind, CustomObject, Kind, Sandbox, SandboxClaim, SandboxKind, TemplateKind,
};
use afresh_kube::server::{NAMESPACE_LABEL, RemoteSandbox, Server};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::api::{DeleteParams, ObjectMeta, PostParams};
use kube::{Api, Client};
use reqwest::Url;
use serde_json::{Value, json};
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinHandle;

use crate::process::{Process, free_port, program, wait_for};

const ADMIN: &str = "token-of-the-administrator";
const CONTROLLER: &str = "token-of-the-controller";
pub(crate) const KEY: &str = "key-of-the-cluster";
/// The identifier of the cluster.
pub(crate) const CLUSTER: &str = "cluster-of-the-tests";

/// The repository.
fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Programs that the tests need.
struct Programs {
    etcd: PathBuf,
    apiserver: PathBuf,
    kubectl: PathBuf,
    afresh: PathBuf,
    guest: PathBuf,
}

impl Programs {
    fn find() -> Result<Self, String> {
        Ok(Self {
            etcd: program("AFRESH_TEST_ETCD")?,
            apiserver: program("AFRESH_TEST_KUBE_APISERVER")?,
            kubectl: program("AFRESH_TEST_KUBECTL")?,
            afresh: program("AFRESH_TEST_AFRESH")?,
            guest: program("AFRESH_TEST_QUICKJS")?,
        })
    }
}

/// A server of sandboxes, which can be stopped and started again.
pub(crate) struct AfreshServer {
    programs: Arc<Programs>,
    dir: TempDir,
    port: u16,
    process: Option<Process>,
}

impl AfreshServer {
    async fn start(programs: Arc<Programs>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let guest = programs.guest.display();
        let config = format!(
            "[sandboxes]\nkeys = \"keys\"\nstore = \"store\"\n[[sandboxes.template]]\n\
             name = \"script\"\nguest = \"{guest}\"\nmemory-mib = 256\n"
        );
        std::fs::write(dir.path().join("serve.toml"), config).unwrap();
        std::fs::write(dir.path().join("keys"), format!("acme {KEY}\n")).unwrap();
        std::fs::write(dir.path().join("key"), KEY).unwrap();
        let mut server = Self { programs, dir, port: free_port(), process: None };
        server.start_again().await;
        server
    }

    pub(crate) async fn start_again(&mut self) {
        let mut command = Command::new(&self.programs.afresh);
        command.arg("serve").args(["--addr", &format!("127.0.0.1:{}", self.port)]);
        command.arg("--config").arg(self.dir.path().join("serve.toml"));
        let mut process = Process::start(&mut command, &self.dir.path().join("log"));
        let url = self.url().join("healthz").unwrap();
        wait_for("the start of afresh", async || {
            let log = self.dir.path().join("log");
            assert!(!process.has_ended(), "{}", std::fs::read_to_string(log).unwrap());
            reqwest::get(url.clone()).await.ok().filter(|answer| answer.status().is_success())
        })
        .await;
        self.process = Some(process);
    }

    /// Kills it.
    pub(crate) fn stop(&mut self) {
        self.process = None;
    }

    pub(crate) fn url(&self) -> Url {
        format!("http://127.0.0.1:{}/", self.port).parse().unwrap()
    }

    /// The file with the API key.
    pub(crate) fn key_file(&self) -> PathBuf {
        self.dir.path().join("key")
    }

    pub(crate) fn client(&self) -> Server {
        Server::new(self.url(), self.key_file()).unwrap()
    }
}

/// The cluster.
pub(crate) struct Cluster {
    programs: Arc<Programs>,
    dir: TempDir,
    url: String,
    afresh: Option<AfreshServer>,
    // In the order of their end.
    _apiserver: Process,
    _etcd: Process,
}

static SHARED: Mutex<Weak<Cluster>> = Mutex::const_new(Weak::new());

impl Cluster {
    /// The cluster of all tests, or None on a host without the programs.
    pub(crate) async fn shared() -> Option<Arc<Self>> {
        let mut shared = SHARED.lock().await;
        if let Some(cluster) = shared.upgrade() {
            return Some(cluster);
        }
        let programs = match Programs::find() {
            Ok(programs) => Arc::new(programs),
            Err(why) => {
                println!("SKIPPED: {why}");
                return None;
            }
        };
        // Only a second one in this process fails, which uses the first.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        // The log of a failed test has the warnings of the controllers.
        let _ = tracing_subscriber::fmt().with_test_writer().with_ansi(false).try_init();
        let cluster = Arc::new(Self::start(programs).await);
        *shared = Arc::downgrade(&cluster);
        Some(cluster)
    }

    async fn start(programs: Arc<Programs>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let (client, peer, secure) = (free_port(), free_port(), free_port());
        let [client, peer] = [client, peer].map(|port| format!("http://127.0.0.1:{port}"));
        let mut etcd = Command::new(&programs.etcd);
        etcd.arg("--data-dir").arg(path("etcd"));
        etcd.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        etcd.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        etcd.args(["--initial-cluster", &format!("default={peer}")]);
        let etcd = Process::start(&mut etcd, &path("etcd.log"));

        let tokens =
            format!("{ADMIN},admin,1,\"system:masters\"\n{CONTROLLER},afresh-controller,2,\n");
        std::fs::write(path("tokens.csv"), tokens).unwrap();
        let keys = repository().join("crates/serve/tests/suite/tls");
        let mut apiserver = Command::new(&programs.apiserver);
        apiserver.args(["--etcd-servers", &client, "--bind-address", "127.0.0.1"]);
        apiserver.args(["--secure-port", &secure.to_string(), "--authorization-mode", "RBAC"]);
        apiserver.args(["--service-cluster-ip-range", "10.0.0.0/24"]);
        apiserver.args(["--service-account-issuer", "https://127.0.0.1"]);
        apiserver.args(["--disable-admission-plugins", "ServiceAccount"]);
        apiserver.arg("--service-account-key-file").arg(keys.join("certificate.pem"));
        apiserver.arg("--service-account-signing-key-file").arg(keys.join("key.pem"));
        apiserver.arg("--cert-dir").arg(path("certificates"));
        apiserver.arg("--token-auth-file").arg(path("tokens.csv"));
        let apiserver = Process::start(&mut apiserver, &path("apiserver.log"));
        let url = format!("https://127.0.0.1:{secure}");
        let mut cluster =
            Self { programs, dir, url, afresh: None, _apiserver: apiserver, _etcd: etcd };
        cluster.set_up().await;
        cluster
    }

    async fn set_up(&mut self) {
        let namespaces: Api<Namespace> = Api::all(self.client(ADMIN));
        let log = self.dir.path().join("apiserver.log");
        wait_for("the start of kube-apiserver", async || {
            let ended = self._apiserver.has_ended();
            assert!(!ended, "{}", std::fs::read_to_string(&log).unwrap());
            namespaces.get_opt("kube-system").await.ok().flatten()
        })
        .await;
        let user = json!({"name": "admin", "user": {"token": ADMIN}});
        let server = json!({"server": self.url, "insecure-skip-tls-verify": true});
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test", "users": [user],
            "clusters": [{"name": "test", "cluster": server}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        });
        std::fs::write(self.dir.path().join("kubeconfig"), config.to_string()).unwrap();
        let definitions = repository().join("deploy/agent-sandbox");
        self.kubectl(&["apply", "-f", definitions.to_str().unwrap()]);
        self.kubectl(&[
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            "crd/sandboxes.agents.x-k8s.io",
            "crd/sandboxclaims.extensions.agents.x-k8s.io",
            "crd/sandboxtemplates.extensions.agents.x-k8s.io",
            "crd/sandboxwarmpools.extensions.agents.x-k8s.io",
        ]);
        // The rights that the chart gives.
        let files = repository().join("deploy/helm/afresh/files");
        let rules = ["", "-cluster", "-lease"]
            .map(|part| files.join(format!("agent-sandbox{part}-rules.yaml")))
            .map(|path| std::fs::read_to_string(path).unwrap())
            .concat()
            .replace("LEASE", "afresh-kube");
        let role = format!(
            "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\n\
             metadata: {{ name: afresh }}\nrules:\n{rules}\n"
        );
        self.apply(&role);
        self.kubectl(&[
            "create",
            "clusterrolebinding",
            "afresh",
            "--clusterrole=afresh",
            "--user=afresh-controller",
        ]);
        self.afresh = Some(AfreshServer::start(self.programs.clone()).await);
    }

    fn client(&self, token: &str) -> Client {
        let mut config = kube::Config::new(self.url.parse().unwrap());
        config.accept_invalid_certs = true;
        config.auth_info = serde_json::from_value(json!({"token": token})).unwrap();
        Client::try_from(config).unwrap()
    }

    /// The configuration of clients with the rights of the administrator.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.dir.path().join("kubeconfig")
    }

    /// Runs kubectl as the administrator: its output.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> String {
        self.try_kubectl(arguments).unwrap_or_else(|error| panic!("kubectl {arguments:?}: {error}"))
    }

    /// Runs kubectl: its output, or its message.
    pub(crate) fn try_kubectl(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.programs.kubectl);
        command.env("KUBECONFIG", self.kubeconfig());
        command.env("HOME", self.dir.path()).args(arguments);
        let output = command.output().unwrap();
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        Ok(String::from_utf8(output.stdout).unwrap())
    }

    /// `kubectl apply`.
    pub(crate) fn apply(&self, text: &str) -> String {
        self.try_apply(text).unwrap()
    }

    /// `kubectl apply`: its output, or its message.
    pub(crate) fn try_apply(&self, text: &str) -> Result<String, String> {
        let file = tempfile::NamedTempFile::new_in(self.dir.path()).unwrap();
        std::fs::write(file.path(), text).unwrap();
        // On the side of the server, since an annotation with the whole object is as deep.
        self.try_kubectl(&["apply", "--server-side", "-f", file.path().to_str().unwrap()])
    }

    /// Another afresh server.
    pub(crate) async fn own_afresh(&self) -> AfreshServer {
        AfreshServer::start(self.programs.clone()).await
    }

    /// A namespace with the template `script`.
    pub(crate) async fn space(self: &Arc<Self>, name: &str) -> Space {
        let namespaces: Api<Namespace> = Api::all(self.client(ADMIN));
        let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let namespace = Namespace { metadata, ..Namespace::default() };
        namespaces.create(&PostParams::default(), &namespace).await.unwrap();
        let afresh = self.afresh.as_ref().unwrap();
        let (server, url) = (afresh.client(), afresh.url());
        let space = Space {
            cluster: self.clone(),
            name: name.to_owned(),
            client: self.client(ADMIN),
            server,
            url,
        };
        space.add::<TemplateKind>("script", template()).await;
        space
    }
}

/// The specification of a `SandboxTemplate` of the template `script`.
pub(crate) fn template() -> Value {
    let ports = json!([{"name": "web", "containerPort": 8000}]);
    let container = json!({"name": "main", "image": "script", "ports": ports});
    json!({"podTemplate": {"spec": {"runtimeClassName": "afresh", "containers": [container]}}})
}

/// The specification of a claim for it.
pub(crate) fn claim() -> Value {
    json!({"sandboxTemplateRef": {"name": "script"}})
}

/// A namespace, and the server of its sandboxes.
pub(crate) struct Space {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) name: String,
    client: Client,
    pub(crate) server: Server,
    pub(crate) url: Url,
}

/// A controller that runs in the test.
pub(crate) struct RunningController {
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<anyhow::Result<()>>,
}

impl RunningController {
    /// Stops it as SIGTERM does.
    pub(crate) async fn stop(mut self) {
        drop(self.stop.take());
        (&mut self.task).await.unwrap().unwrap();
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.task.is_finished()
    }
}

impl Drop for RunningController {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Space {
    /// The identifier of its controllers.
    pub(crate) fn controller(&self) -> String {
        format!("{}/afresh-kube", self.name)
    }

    /// A client with the rights of the controller.
    pub(crate) fn controller_client(&self) -> Client {
        self.cluster.client(CONTROLLER)
    }

    /// The Secret of a `Sandbox`.
    pub(crate) async fn secret_of(&self, name: &str) -> String {
        let found = self.sandbox_reason(name, "DependenciesReady").await;
        found.status().access.secret_name.unwrap()
    }

    /// Starts a controller of this namespace, with the rights of the chart.
    pub(crate) fn control(&self) -> RunningController {
        self.control_with(|_| ())
    }

    pub(crate) fn control_with(&self, change: impl FnOnce(&mut Settings)) -> RunningController {
        let mut settings = Settings {
            controller: self.controller(),
            images: Vec::new(),
            confirmation: Duration::from_millis(500),
            public_url: self.url.clone(),
            domain: Some("sandboxes.test".to_owned()),
            namespace: Some(self.name.clone()),
            ignore_other_runtimes: false,
            keep: Duration::from_secs(3600),
            resync: Duration::from_millis(500),
            sweep: Duration::from_secs(1),
            orphan_age: Duration::from_secs(3600),
        };
        change(&mut settings);
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let lease = LeaseSettings {
            namespace: self.name.clone(),
            name: "afresh-kube".to_owned(),
            identity: format!("controller-{count}"),
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let stopped = async {
            // The sender is dropped.
            let _ = stopped.await;
        };
        let (client, server) = (self.cluster.client(CONTROLLER), self.server.clone());
        let (cluster, monitor) = (Some(CLUSTER.to_owned()), Arc::default());
        let task = tokio::spawn(run(client, server, settings, cluster, lease, monitor, stopped));
        RunningController { stop: Some(stop), task }
    }

    pub(crate) fn api<K: Kind>(&self) -> Api<CustomObject<K>> {
        Api::namespaced(self.client.clone(), &self.name)
    }

    pub(crate) async fn add<K: Kind>(&self, name: &str, spec: Value) -> CustomObject<K> {
        let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let object = CustomObject::new(metadata, spec);
        self.api::<K>().create(&PostParams::default(), &object).await.unwrap()
    }

    pub(crate) async fn change<K: Kind>(&self, name: &str, patch: Value) {
        let patch = kube::api::Patch::Merge(patch);
        self.api::<K>().patch(name, &kube::api::PatchParams::default(), &patch).await.unwrap();
    }

    pub(crate) async fn delete<K: Kind>(&self, name: &str) {
        self.api::<K>().delete(name, &DeleteParams::default()).await.unwrap();
    }

    pub(crate) async fn is_gone<K: Kind>(&self, name: &str) {
        let what = format!("the end of {} {name}", K::KIND);
        wait_for(&what, async || {
            self.api::<K>().get_opt(name).await.unwrap().is_none().then_some(())
        })
        .await;
    }

    /// Waits until `Ready` has a reason: its message.
    pub(crate) async fn claim_reason(&self, name: &str, reason: &str) -> String {
        wait_for(&format!("{reason} of the claim {name}"), async || {
            let conditions = self.claim(name).await?.status().conditions;
            let ready = condition::find(&conditions, condition::READY)?;
            (ready.reason == reason).then(|| ready.message.clone())
        })
        .await
    }

    pub(crate) async fn sandbox_reason(&self, name: &str, reason: &str) -> Sandbox {
        wait_for(&format!("{reason} of the sandbox {name}"), async || {
            let found = self.api::<SandboxKind>().get_opt(name).await.unwrap()?;
            let conditions = found.status().conditions;
            let ready = condition::find(&conditions, condition::READY)?;
            (ready.reason == reason).then_some(found)
        })
        .await
    }

    pub(crate) async fn claim(&self, name: &str) -> Option<SandboxClaim> {
        self.api::<ClaimKind>().get_opt(name).await.unwrap()
    }

    /// Waits until a claim is ready.
    pub(crate) async fn ready(&self, name: &str) -> SandboxClaim {
        self.claim_reason(name, "DependenciesReady").await;
        self.claim(name).await.unwrap()
    }

    /// The sandboxes of this namespace on the server.
    pub(crate) async fn remotes(&self) -> Vec<RemoteSandbox> {
        self.server.list(NAMESPACE_LABEL, &self.name).await.unwrap().into_whole().unwrap()
    }

    /// Runs code with the data of a Secret: its output.
    pub(crate) async fn run_code(&self, secret: &str, code: &str) -> String {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), &self.name);
        let data = secrets.get(secret).await.unwrap().data.unwrap();
        let data: BTreeMap<_, _> = data
            .into_iter()
            .map(|(key, value)| (key, String::from_utf8(value.0).unwrap()))
            .collect();
        let url: Url = data["url"].parse().unwrap();
        let answer = reqwest::Client::new()
            .post(url.join("execute").unwrap())
            .header("E2b-Sandbox-Id", &data["id"])
            .header("X-Access-Token", &data["token"])
            .header("Content-Type", "application/json")
            .body(json!({"code": code}).to_string());
        answer.send().await.unwrap().text().await.unwrap()
    }
}
