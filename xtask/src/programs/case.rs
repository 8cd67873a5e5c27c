//! A program of the suite: the packages that bring it, the files that it needs, and the script that
//! uses it.

/// The use of a program, as a script of bash.
///
/// The script runs in an empty directory, `$HOME`, with `$FILES` as the directory that `prepare`
/// has filled. Its standard output and its exit status must be the same natively and as a guest, so
/// it prints no times, numbers of processes or names of users.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProgramCase {
    pub(super) name: &'static str,
    /// The use, for the table.
    pub(super) about: &'static str,
    /// Commands that must be in `PATH`, in addition to bash and coreutils.
    pub(super) needs: &'static [&'static str],
    /// The Debian packages that `--install` adds.
    pub(super) packages: &'static [&'static str],
    /// A script that runs natively, once, in `$FILES`. It may use the network.
    pub(super) prepare: &'static str,
    pub(super) script: &'static str,
    /// Whether it runs natively as a user without rights: the program refuses root.
    pub(super) unprivileged: bool,
    /// Whether it is part of `cargo xtask test`.
    pub(super) short: bool,
    /// The image for the root of the guest; without one it has the programs of the host.
    pub(super) image: Option<Image>,
    /// Why it fails as a guest, where that is known.
    pub(super) fails: Option<&'static str>,
}

/// An OCI image, whose program gets the script as its standard input.
#[derive(Clone, Copy, Debug)]
pub(super) struct Image {
    /// Its address in a registry (`oci://…`), or a file in `$FILES`.
    pub(super) reference: &'static str,
    pub(super) command: &'static [&'static str],
    /// The expected output.
    pub(super) output: &'static str,
}

impl Image {
    /// The registry that it comes from, if it does.
    pub(super) fn registry(&self) -> Option<&'static str> {
        self.reference.strip_prefix("oci://")?.split('/').next()
    }
}

impl ProgramCase {
    /// A case without a program.
    pub(super) const EMPTY: Self = Self {
        name: "",
        about: "",
        needs: &[],
        packages: &[],
        prepare: "",
        script: "",
        unprivileged: false,
        short: false,
        image: None,
        fails: None,
    };
}
