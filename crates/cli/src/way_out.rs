//! Hints after an error: options and commands that the library's errors cannot know about.

use afresh::{CallError, OpenError, Place, SaveError, VerifyError};

/// Prints, below an error, where in the guest it happened and which option or command helps.
pub(crate) fn explain(error: &anyhow::Error) {
    for cause in error.chain() {
        // Errors that only wrap another one are not separate causes.
        let call = match cause.downcast_ref::<VerifyError>() {
            Some(VerifyError::Call(error)) => Some(error),
            _ => cause.downcast_ref::<CallError>(),
        };
        if let Some(trace) = call.and_then(CallError::backtrace) {
            eprintln!("{}", trace.trim_end());
        }
        let open = match cause.downcast_ref::<SaveError>() {
            Some(SaveError::Open(error)) => Some(error),
            _ => cause.downcast_ref::<OpenError>(),
        };
        if let Some(way_out) = open.and_then(opening) {
            eprintln!("help: {way_out}");
        }
    }
}

/// The way out for something that did not open.
fn opening(error: &OpenError) -> Option<String> {
    match error {
        #[cfg(feature = "seal")]
        OpenError::Seal { source, .. } => sealed(source),
        OpenError::Place { place: place @ Place::Remote(_), .. } => {
            Some(format!("`afresh pull {place} DIR` makes a directory of it"))
        }
        OpenError::Feature { feature, .. } => {
            Some(format!("`cargo install afresh-cli --features {feature}` builds one that can"))
        }
        #[cfg(feature = "linux")]
        OpenError::Guest { source, .. } if ends_by_itself(&**source) => {
            Some("`afresh exec -- PROGRAM ARGUMENTS` runs a program that ends by itself".to_owned())
        }
        #[cfg(feature = "wasm")]
        OpenError::Guest { source, .. } if lacks_imports(&**source) => Some(
            "--stub-imports loads it all the same; a call of one of these functions then fails"
                .to_owned(),
        ),
        _ => None,
    }
}

#[cfg(feature = "seal")]
fn sealed(error: &afresh::store::SealError) -> Option<String> {
    use afresh::store::SealError;
    let text = match error {
        SealError::Locked => "--key FILE gives the key it was sealed with",
        SealError::WrongKey { .. } => {
            "--key FILE names another key; give the one it was sealed with"
        }
        SealError::NotSealed => "without --key it opens",
        SealError::Unsigned => {
            "`afresh snapshot --sign FILE` signs; without --trust unsigned snapshots open"
        }
        SealError::Untrusted(_) => {
            "--trust FILE names the public keys that are trusted; `afresh keygen signing` prints one"
        }
        _ => return None,
    };
    Some(text.to_owned())
}

/// Whether the guest is a Linux program that ended before it could be called.
#[cfg(feature = "linux")]
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
