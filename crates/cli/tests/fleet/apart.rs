//! A host in a separate network namespace, from which packets can be dropped.

use std::process::{Command, Stdio};

/// The namespace, and a pair of devices between it and the test.
pub(crate) struct Namespace {
    name: String,
    /// The test's address, as the namespace sees it.
    pub(crate) ours: String,
    /// The address inside the namespace.
    pub(crate) theirs: String,
}

fn ip(arguments: &[&str]) -> bool {
    let mut command = Command::new("ip");
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The devices go with it.
        ip(&["netns", "delete", &self.name]);
    }
}

impl Namespace {
    /// Makes one, or prints why that is impossible.
    pub(crate) fn new() -> Option<Self> {
        let number = std::process::id();
        let net = format!("10.213.{}", number % 256);
        let (name, ours, theirs) =
            (format!("afresh-{number}"), format!("{net}.1"), format!("{net}.2"));
        let this = Self { name, ours, theirs };
        let (own, its) = (format!("af{number}a"), format!("af{number}b"));
        let name = this.name.as_str();
        let made = ip(&["netns", "add", name])
            && ip(&["link", "add", &own, "type", "veth", "peer", "name", &its, "netns", name])
            && ip(&["address", "add", &format!("{}/30", this.ours), "dev", &own])
            && ip(&["link", "set", &own, "up"])
            && ip(&["-n", name, "address", "add", &format!("{}/30", this.theirs), "dev", &its])
            && ip(&["-n", name, "link", "set", &its, "up"])
            && ip(&["-n", name, "link", "set", "lo", "up"])
            // That they can be dropped later.
            && this.drops("--append", 9)
            && this.drops("--delete", 9);
        if !made {
            println!(
                "SKIPPED: a network namespace and iptables need root, and the tools of iproute2 and iptables"
            );
        }
        made.then_some(this)
    }

    /// A program that runs within.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }

    fn drops(&self, change: &str, port: u16) -> bool {
        let mut command = self.command("iptables");
        command.args([change, "OUTPUT", "--protocol", "tcp", "--destination", &self.ours]);
        command.args(["--dport", &port.to_string(), "--jump", "DROP"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }

    /// Drops every packet to this port of the test, or lets them pass again.
    pub(crate) fn cut(&self, port: u16, cut: bool) {
        assert!(self.drops(if cut { "--append" } else { "--delete" }, port));
    }
}
