//! Hints after an error: options and commands that the library does not know.

#[cfg(linux_guests)]
use std::io::Read;
#[cfg(linux_guests)]
use std::path::Path;

use afresh::{CallError, OpenError, Place, SaveError, VerifyError};

#[cfg(linux_guests)]
use crate::guest::names_host_program;
use crate::output::message;
#[cfg(linux_guests)]
use crate::output::quoted;

/// Prints the guest's backtrace below an error, and the option or command that helps.
pub(crate) fn print(error: &anyhow::Error) {
    for cause in error.chain() {
        // Errors that only wrap another one are not separate causes.
        let call = match cause.downcast_ref::<VerifyError>() {
            Some(VerifyError::Call(error)) => Some(error),
            _ => cause.downcast_ref::<CallError>(),
        };
        if let Some(trace) = call.and_then(CallError::backtrace) {
            message!("{}", trace.trim_end());
        }
        if let Some(CallError::Timeout { .. }) = call {
            message!("help: `--timeout MS` sets another limit");
        }
        let open = match cause.downcast_ref::<SaveError>() {
            Some(SaveError::Open(error)) => Some(error),
            _ => cause.downcast_ref::<OpenError>(),
        };
        if let Some(hint) = open.and_then(opening) {
            message!("help: {hint}");
        }
    }
}

/// The hint for a guest or snapshot that did not open.
fn opening(error: &OpenError) -> Option<String> {
    match error {
        #[cfg(feature = "seal")]
        OpenError::Seal { source, .. } => sealed(source),
        OpenError::Place { place: place @ Place::Remote(_), .. } => {
            Some(format!("`afresh pull {place} DIR` copies it to a directory"))
        }
        OpenError::Snapshot { reference, .. } if lacks_credentials(reference) => Some(
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT for a server other than Amazon's; \
             without them the machine's metadata service is asked for credentials"
                .to_owned(),
        ),
        #[cfg(linux_guests)]
        OpenError::Guest { source, .. } if ends_by_itself(&**source) => {
            Some("`afresh exec -- PROGRAM ARGUMENTS` runs a program that ends by itself".to_owned())
        }
        #[cfg(linux_guests)]
        OpenError::Guest { reference, source }
            if !source.is::<afresh::linux::WarmError>()
                && names_host_program(reference.as_ref()) =>
        {
            let path = with_slash(Path::new(reference));
            Some(format!("`afresh exec -- {path}` runs it as a Linux program, and so does --linux"))
        }
        #[cfg(linux_guests)]
        OpenError::Read { path, .. } if names_host_program(path.as_os_str()) => {
            Some("--linux runs a program of PATH".to_owned())
        }
        #[cfg(linux_guests)]
        OpenError::Unknown { path } => script_command(path)
            .map(|command| format!("`afresh exec --dir {command}` runs a script")),
        OpenError::Feature { feature, .. } => Some(format!(
            "a build of `afresh-cli` with `--features {feature}` supports it"
        )),
        #[cfg(feature = "wasm")]
        OpenError::Guest { source, .. } if lacks_imports(&**source) => Some(
            "--stub-imports loads it anyway; a call of one of these functions then fails"
                .to_owned(),
        ),
        _ => None,
    }
}

/// A path as a shell runs it.
#[cfg(linux_guests)]
fn with_slash(path: &Path) -> String {
    match path.components().count() {
        1 => quoted(&Path::new(".").join(path)),
        _ => quoted(path),
    }
}

/// The directory of a script, and the command that runs the script, by the end of its name or its
/// first line.
#[cfg(linux_guests)]
fn script_command(path: &Path) -> Option<String> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let interpreter = match path.extension().and_then(|end| end.to_str()) {
        Some("py") => Some("python3"),
        Some("js" | "mjs" | "cjs") => Some("node"),
        Some("rb") => Some("ruby"),
        Some("pl") => Some("perl"),
        Some("sh") => Some("sh"),
        _ => None,
    };
    if let Some(interpreter) = interpreter {
        return Some(format!("{} -- {interpreter} {}", quoted(dir), quoted(path)));
    }
    if !path.is_file() {
        return None;
    }
    let mut start = [0; 2];
    std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut start)).ok()?;
    (&start == b"#!").then(|| format!("{} -- {}", quoted(dir), with_slash(path)))
}

/// Whether a snapshot on S3 was opened without credentials in the environment.
fn lacks_credentials(reference: &str) -> bool {
    reference.starts_with("s3://") && std::env::var_os("AWS_ACCESS_KEY_ID").is_none()
}

#[cfg(feature = "seal")]
fn sealed(error: &afresh::store::SealError) -> Option<String> {
    use afresh::store::SealError;
    let text = match error {
        SealError::Locked => "pass the key that sealed it with --key FILE",
        SealError::WrongKey { .. } => "--key FILE has another key; pass the one that sealed it",
        SealError::NotSealed => "the snapshot is not sealed: omit --key",
        SealError::Unsigned => {
            "`afresh snapshot --sign FILE` makes a signed one; without --trust unsigned ones open"
        }
        SealError::Untrusted(_) => {
            "add the signer's public key, as `afresh keygen signing` printed it, to the file of --trust"
        }
        _ => return None,
    };
    Some(text.to_owned())
}

/// Whether the guest is a Linux program that ended before it could be called.
#[cfg(linux_guests)]
fn ends_by_itself(error: &(dyn std::error::Error + 'static)) -> bool {
    use afresh::linux::WarmError;
    matches!(error.downcast_ref(), Some(WarmError::Ended { .. }))
}

/// Whether the guest has imports that are not provided.
#[cfg(feature = "wasm")]
fn lacks_imports(mut error: &(dyn std::error::Error + 'static)) -> bool {
    use afresh::wasm::{LoadError, WarmError};
    loop {
        let load = match error.downcast_ref::<WarmError>() {
            Some(WarmError::Load(load)) => Some(load),
            _ => error.downcast_ref::<LoadError>(),
        };
        if let Some(LoadError::Imports { .. } | LoadError::Link(_)) = load {
            return true;
        }
        match error.source() {
            Some(cause) => error = cause,
            None => return false,
        }
    }
}
