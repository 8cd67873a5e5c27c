//! Containers' images as guests: out of a registry, out of a layout, and out of the snapshot that
//! was made of one.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, set_parent_process_death_signal};

fn afresh(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
    command.current_dir(folder).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn answer(folder: &Path, arguments: &[&str]) -> String {
    let output = afresh(folder, arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// A program that `cargo xtask test` installs if Go is available.
fn tool(variable: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable).map(PathBuf::from);
    if path.is_none() {
        println!(
            "SKIPPED: {variable} names no program; `cargo xtask test` installs it where there is Go"
        );
    }
    path
}

/// The reference implementation of a registry, on loopback.
struct Registry {
    address: SocketAddr,
    child: Child,
}

impl Drop for Registry {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Registry {
    fn start(program: &Path, folder: &Path) -> Self {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let file = folder.join("registry.yml");
        let data = folder.join("data");
        let text = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: {address}\n",
            data.display()
        );
        std::fs::write(&file, text).unwrap();
        let mut command = Command::new(program);
        command.arg("serve").arg(file).env("OTEL_TRACES_EXPORTER", "none");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: between fork and exec the closure makes one system call, and allocates nothing.
        unsafe {
            command.pre_exec(|| {
                // Should the test be killed, the server goes with it.
                Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
            });
        }
        let registry = Self { address, child: command.spawn().unwrap() };
        let started = Instant::now();
        while TcpStream::connect(address).is_err() {
            assert!(started.elapsed() < Duration::from_secs(120), "the registry does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        registry
    }
}

/// A tar with this host's shell and its libraries, and a script that answers each line.
fn layer(folder: &Path) -> Option<PathBuf> {
    let root = folder.join("root");
    let copy = |from: &str, to: &str| {
        let to = root.join(to.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, to).unwrap();
    };
    let shell = "/bin/sh";
    let out = Command::new("ldd").arg(shell).output().ok().filter(|out| out.status.success());
    let Some(out) = out else {
        println!("SKIPPED: no ldd, or a shell that needs none");
        return None;
    };
    copy(shell, shell);
    let out = String::from_utf8(out.stdout).unwrap();
    out.split_whitespace().filter(|word| word.starts_with('/')).for_each(|path| copy(path, path));
    let script = "n=0\nwhile read -r line; do n=$((n+1)); echo \"$WORD $1 $line $n\"; done\n";
    std::fs::create_dir(root.join("app")).unwrap();
    std::fs::write(root.join("app/answer"), script).unwrap();
    let tar = folder.join("layer.tar");
    let made = Command::new("tar").arg("-cf").arg(&tar).arg("-C").arg(&root).arg(".").status();
    made.is_ok_and(|made| made.success()).then_some(tar)
}

#[test]
fn an_image_in_a_registry_is_a_guest() {
    let (Some(program), Some(crane)) = (tool("AFRESH_TEST_REGISTRY"), tool("AFRESH_TEST_CRANE"))
    else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let Some(layer) = layer(folder) else { return };
    let registry = Registry::start(&program, folder);
    let name = format!("{}/team/app:v1", registry.address);
    let crane = |arguments: &[&str]| {
        let output = Command::new(&crane).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    crane(&["append", "--oci-empty-base", "-f", layer.to_str().unwrap(), "-t", &name]);
    crane(&[
        "mutate",
        &name,
        "--entrypoint=sh,answer",
        "--cmd=world",
        "--env=WORD=hello",
        "--workdir=/app",
        "--set-platform=linux/amd64",
        "-t",
        &name,
    ]);
    let image = format!("oci://{name}");
    let output = afresh(folder, &["run", &image, "--input", "a"]);
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    // A missing feature of the host is named; any other failure fails the test.
    if ["this host", "seccomp", "userfaultfd", "not permitted"]
        .iter()
        .any(|word| why.contains(word))
    {
        println!("SKIPPED: {}", why.trim());
        return;
    }
    assert_eq!(String::from_utf8_lossy(&output.stdout), "hello world a 1\n", "{why}");
    // Run to its end, out of the registry and out of a layout, with arguments in place of the
    // command.
    let pulled = folder.join("pulled");
    crane(&["pull", "--format", "oci", &name, pulled.to_str().unwrap()]);
    std::fs::write(folder.join("lines"), "a\nb\n").unwrap();
    for (image, arguments, heard) in
        [(&*image, &["--", "you"][..], "you"), ("./pulled", &[], "world")]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
        command.current_dir(folder).arg("exec").arg(image).args(arguments);
        command.stdin(std::fs::File::open(folder.join("lines")).unwrap());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let expected = format!("hello {heard} a 1\nhello {heard} b 2\n");
        assert_eq!(said, expected, "{}", String::from_utf8_lossy(&output.stderr));
    }
    // Warm, with arguments and a variable, fetched once.
    let said = answer(
        folder,
        &[
            "run", "--cache", "cache", "--warm", "first", "--env", "WORD=bye", "-n", "2",
            "--input", "b", &image, "you",
        ],
    );
    assert_eq!(said, "bye you b 2\nbye you b 2\n");
    answer(
        folder,
        &["snapshot", "--cache", "cache", "--warm", "first", "--to", "store@v1", &image],
    );
    crane(&["pull", "--format=oci", &name, folder.join("layout").to_str().unwrap()]);
    let nothing = format!("oci://{}/team/app:v2", registry.address);
    let refused = String::from_utf8(afresh(folder, &["run", &nothing]).stderr).unwrap();
    assert!(refused.contains("no snapshot named `v2`") && refused.contains("v1"), "{refused}");
    drop(registry);

    // Without the registry: the snapshot has all of it, a layout too, and is verified like any
    // other guest.
    assert_eq!(answer(folder, &["run", "store@v1", "--input", "c"]), "hello world c 2\n");
    assert_eq!(answer(folder, &["run", "layout", "--input", "d"]), "hello world d 1\n");
    let tar = ["-cf", "image.tar", "-C", "layout", "."];
    assert!(Command::new("tar").current_dir(folder).args(tar).status().unwrap().success());
    assert_eq!(answer(folder, &["run", "image.tar", "--input", "d"]), "hello world d 1\n");
    answer(folder, &["verify", "layout", "--input", "e", "-n", "3"]);
    let unknown = String::from_utf8(afresh(folder, &["run", "layout@v9"]).stderr).unwrap();
    assert!(unknown.contains("v9"), "{unknown}");
    let inspected = afresh(folder, &["inspect", "layout"]);
    let said = String::from_utf8(inspected.stderr).unwrap();
    assert!(!inspected.status.success(), "{said}");
}
