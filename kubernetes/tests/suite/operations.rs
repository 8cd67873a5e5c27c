//! The program itself: its probes, its metrics and its addresses.

use std::path::Path;
use std::process::Command;

use afresh_kube::resource::ClaimKind;

use crate::cluster::{CLUSTER, Cluster, claim};
use crate::process::{Process, free_port, wait_for};

/// The inodes of the sockets that a process has.
fn sockets(process: u32) -> Vec<String> {
    let entries = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let links = entries.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    let names = links.filter_map(|link| Some(link.to_str()?.to_owned()));
    let inode = |name: String| Some(name.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned());
    names.filter_map(inode).collect()
}

/// Local addresses, in hexadecimal digits, on which a process receives connections or datagrams.
fn bound_addresses(process: u32) -> Vec<String> {
    const LISTENING: &str = "0A";
    let own = sockets(process);
    let mut addresses = Vec::new();
    for protocol in ["tcp", "tcp6", "udp", "udp6"] {
        let path = format!("/proc/{process}/net/{protocol}");
        if !Path::new(&path).exists() {
            continue;
        }
        for line in std::fs::read_to_string(path).unwrap().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let receives = protocol.starts_with("udp") || fields[3] == LISTENING;
            if receives && own.iter().any(|inode| inode == fields[9]) {
                addresses.push(fields[1].to_owned());
            }
        }
    }
    addresses
}

#[tokio::test(flavor = "multi_thread")]
async fn the_program_listens_for_probes_on_loopback_and_on_nothing_else() {
    let Some(cluster) = Cluster::shared().await else { return };
    let mut afresh = cluster.own_afresh().await;
    let mut space = cluster.space("operations").await;
    (space.server, space.url) = (afresh.client(), afresh.url());
    let port = free_port();
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_afresh-kube"));
    command.env("KUBECONFIG", cluster.kubeconfig());
    command.arg("--server").arg(afresh.url().as_str()).arg("--api-key-file").arg(afresh.key_file());
    command.args(["--lease-namespace", &space.name, "--namespace", &space.name]);
    command.args(["--cluster-id", CLUSTER, "--metrics", &format!("127.0.0.1:{port}")]);
    let mut process = Process::start(&mut command, log.path());
    let get = async |path: &str| {
        let answer = reqwest::get(format!("http://127.0.0.1:{port}/{path}")).await.ok()?;
        Some((answer.status().as_u16(), answer.text().await.ok()?))
    };
    wait_for("readiness", async || {
        assert!(!process.has_ended(), "{}", std::fs::read_to_string(log.path()).unwrap());
        get("readyz")
            .await
            .filter(|(status, text)| *status == 200 && text.contains("lease is held"))
    })
    .await;
    assert_eq!(get("healthz").await.unwrap(), (200, "alive\n".to_owned()));
    space.add::<ClaimKind>("one", claim()).await;
    space.ready("one").await;
    let lines = [
        "afresh_kube_ready_seconds_count{kind=\"SandboxClaim\"} 1",
        "afresh_kube_sandboxes_total{event=\"made\"} 1",
        "afresh_kube_lease_held 1",
        "afresh_kube_healthy{check=\"tenant\"} 1",
    ];
    wait_for("the metrics", async || {
        let (_, text) = get("metrics").await?;
        lines.iter().all(|line| text.lines().any(|found| found == *line)).then_some(())
    })
    .await;
    // 127.0.0.1, with its first byte last.
    assert_eq!(bound_addresses(process.id()), [format!("0100007F:{port:04X}")]);
    let path = "jsonpath={.metadata.annotations.agents\\.x-k8s\\.io/afresh-tenant}";
    wait_for("the tenant in the lease", async || {
        let all = ["get", "-n", &space.name, "lease", "afresh-kube", "-o", path];
        (cluster.kubectl(&all) == "acme").then_some(())
    })
    .await;
    // A server that does not answer makes it unready, and it stays alive.
    afresh.stop();
    let (_, text) = wait_for("the failed check", async || {
        get("readyz").await.filter(|(status, _)| *status == 503)
    })
    .await;
    assert!(text.starts_with("server: the afresh server does not answer"), "{text}");
    assert_eq!(get("healthz").await.unwrap().0, 200);
    afresh.start_again().await;
    wait_for("readiness", async || get("readyz").await.filter(|(status, _)| *status == 200)).await;
}
