//! The isolation layers of a guest process behind the filter, as the kernel reports them for the
//! process that all others are forked from.

use std::fs;
use std::io;

use rustix::thread::UnshareFlags;

use super::PlatformError;
use super::boot;

/// A layer that stops a system call of the guest if one ever passes the filter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IsolationLayer {
    /// Its name: `user-namespace`, for example.
    pub name: &'static str,
    /// Why it is missing, and how to get it; nothing if it is in place.
    pub missing: Option<String>,
}

/// Namespaces: the flag of each, its name in `/proc`, and the name of the layer.
pub(super) const NAMESPACES: [(UnshareFlags, &str, &str); 5] = [
    (UnshareFlags::NEWUSER, "user", "user-namespace"),
    (UnshareFlags::NEWNET, "net", "network-namespace"),
    (UnshareFlags::NEWIPC, "ipc", "ipc-namespace"),
    (UnshareFlags::NEWNS, "mnt", "mount-namespace"),
    (UnshareFlags::NEWUTS, "uts", "uts-namespace"),
];

/// The layers around the process `id`.
pub(super) fn layers_of(id: u32) -> Vec<IsolationLayer> {
    let mut layers: Vec<_> = NAMESPACES
        .into_iter()
        .map(|(_, kind, name)| IsolationLayer { name, missing: shared_namespace(id, kind) })
        .collect();
    let status = fs::read_to_string(format!("/proc/{id}/status"));
    let field = |name: &str, expected: &str| {
        let found = value_of(&status, name)?;
        (found != expected).then(|| format!("{name} of its process is {found}"))
    };
    layers.push(IsolationLayer { name: "no-new-privileges", missing: field("NoNewPrivs:", "1") });
    let none = "0000000000000000";
    let capabilities = ["CapInh:", "CapPrm:", "CapEff:"];
    let missing = capabilities.into_iter().find_map(|name| field(name, none));
    layers.push(IsolationLayer { name: "no-capabilities", missing });
    let way_out = "this kernel has no Landlock, or a seccomp profile refuses it: boot with `landlock` in lsm=";
    let missing = (!boot::has_landlock()).then(|| way_out.to_owned());
    layers.push(IsolationLayer { name: "landlock", missing });
    layers.push(IsolationLayer { name: "limits", missing: missing_limit(id) });
    layers
}

/// Fails when one of `layers` is missing.
pub(super) fn require_all(layers: &[IsolationLayer]) -> Result<(), PlatformError> {
    let missing: Vec<_> = layers
        .iter()
        .filter_map(|layer| Some(format!("{} ({})", layer.name, layer.missing.as_ref()?)))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(PlatformError::missing(
        "all isolation layers are required, and some are missing",
        io::Error::other(missing.join("; ")),
        "remove what is named, or require no isolation layers",
    ))
}

/// Why the process shares a namespace with this one.
fn shared_namespace(id: u32, kind: &str) -> Option<String> {
    let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{kind}"));
    match (of("self"), of(&id.to_string())) {
        (Ok(own), Ok(other)) if own != other => None,
        (Ok(_), Ok(_)) => Some(format!(
            "the kernel refused a namespace of kind {kind}: allow user namespaces \
             (user.max_user_namespaces, kernel.unprivileged_userns_clone, \
             kernel.apparmor_restrict_unprivileged_userns, the container's seccomp profile) and user.max_{kind}_namespaces"
        )),
        (Err(error), _) | (_, Err(error)) => Some(format!("/proc does not show it: {error}")),
    }
}

/// The value of a field of a status file.
fn value_of<'a>(status: &'a io::Result<String>, name: &str) -> Option<&'a str> {
    let lines = status.as_ref().map_or("", String::as_str).lines();
    let found = lines.filter_map(|line| line.strip_prefix(name)).next();
    Some(found.map_or("not shown by /proc", str::trim))
}

/// The first limit that does not bind the process.
fn missing_limit(id: u32) -> Option<String> {
    let limits = fs::read_to_string(format!("/proc/{id}/limits"));
    let few = boot::DESCRIPTORS.to_string();
    [("Max core file size", "0"), ("Max file size", "0"), ("Max open files", few.as_str())]
        .into_iter()
        .find_map(|(name, most)| {
            let found = value_of(&limits, name)?;
            let bound = found.split_whitespace().take(2).all(|value| value == most);
            (!bound).then(|| format!("{name} of its process is {found}"))
        })
}
