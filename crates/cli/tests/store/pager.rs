//! `afresh pager` as a program, with virtual machine monitors that fault.

use std::fs;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use afresh::pager::vmm::ControlClient;
use afresh_sys::{Interest, PAGE_SIZE, PageRange, Protection, Reservation, Uffd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::{Bench, TEST_TIMEOUT, err, memory, two_snapshots};

/// A running pager, ended by the tests' end.
struct Pager {
    child: Option<Child>,
    errors: PathBuf,
}

impl Pager {
    fn start(bench: &Bench, arguments: &[&str]) -> Self {
        let mut all = vec!["pager", "--socket", "socket"];
        all.extend(arguments);
        let mut command = bench.command(&all);
        let errors = bench.path("pager-errors");
        command.stdout(Stdio::piped()).stderr(fs::File::create(&errors).unwrap());
        Self { child: Some(command.spawn().unwrap()), errors }
    }

    fn connect(&self, socket: &Path) -> UnixStream {
        let start = Instant::now();
        loop {
            match UnixStream::connect(socket) {
                Ok(stream) => return stream,
                Err(error) => assert!(start.elapsed() < TEST_TIMEOUT, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until its errors name this.
    fn wait_for_error(&self, word: &str) {
        let start = Instant::now();
        while !fs::read_to_string(&self.errors).unwrap().contains(word) {
            assert!(start.elapsed() < TEST_TIMEOUT, "{word} is not in {}", self.errors.display());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn terminate(&self) {
        let pid = Pid::from_child(self.child.as_ref().unwrap());
        kill_process(pid, Signal::TERM).unwrap();
    }

    fn wait(mut self) -> Output {
        let output = self.child.take().unwrap().wait_with_output().unwrap();
        Output { stderr: fs::read(&self.errors).unwrap(), ..output }
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The state of a VMM: guest memory without pages, registered with a userfaultfd.
struct Vmm {
    memory: Reservation,
    uffd: Uffd,
}

impl Vmm {
    fn new(pages: usize) -> Option<Self> {
        let uffd = match Uffd::open_for_pager() {
            Ok(uffd) => uffd,
            Err(error) => {
                println!("SKIPPED: {error}");
                return None;
            }
        };
        let memory = Reservation::new(pages).unwrap();
        let all = PageRange::new(0, pages);
        memory.map_anonymous(all, Protection::ReadWrite).unwrap();
        uffd.register(memory.page_ptr(0), all.byte_len(), Interest::MISSING).unwrap();
        Some(Self { memory, uffd })
    }

    /// Sends mappings and userfaultfd, as Firecracker does.
    fn hand_over(&self, stream: &UnixStream) {
        let text = format!(
            r#"[{{"base_host_virt_addr":{},"size":{},"offset":0,"page_size":4096}}]"#,
            self.memory.page_ptr(0) as usize,
            self.memory.pages() * PAGE_SIZE,
        );
        let fds = [self.uffd.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let parts = [IoSlice::new(text.as_bytes())];
        sendmsg(stream, &parts, &mut control, SendFlags::empty()).unwrap();
    }

    /// Reads every page, the last first, which no streaming has reached yet.
    fn read(&self) -> Vec<u8> {
        let mut out = vec![0; self.memory.pages() * PAGE_SIZE];
        for page in (0..self.memory.pages()).rev() {
            let to = out[page * PAGE_SIZE..][..PAGE_SIZE].as_mut_ptr();
            // SAFETY: the page is in the reservation, which is readable; the buffer has room for
            // it.
            unsafe { to.copy_from_nonoverlapping(self.memory.page_ptr(page), PAGE_SIZE) };
        }
        out
    }
}

#[test]
fn the_pager_serves_every_page_to_one_vmm_after_another() {
    let bench = Bench::new();
    let numbers: Vec<u32> = (0..700).map(|n| if n % 5 == 0 { 0 } else { n }).collect();
    let expected = memory(&numbers);
    fs::write(bench.path("mem"), &expected).unwrap();
    bench.ok(&["import", "mem", "store", "--encoding", "zstd"]);
    let socket = bench.path("socket");
    for how in [&[][..], &["--on-demand"]] {
        let pager = Pager::start(&bench, &[&["store", "--window", "4"], how].concat());
        for _ in 0..2 {
            let Some(vmm) = Vmm::new(numbers.len()) else { return };
            let stream = pager.connect(&socket);
            assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
            vmm.hand_over(&stream);
            assert!(vmm.read() == expected, "{how:?}");
        }
        // A hostile one between them harms no other.
        drop(pager.connect(&socket));
        let message = bench.fails(1, &["pager", "store", "--socket", "socket"]);
        assert!(message.contains("another process listens"), "{message}");
        pager.wait_for_error("VMM vm.3: the VMM's handshake is refused");
        pager.terminate();
        let output = pager.wait();
        assert_eq!(output.status.code(), Some(0), "{}", err(&output));
        assert!(!socket.exists(), "the socket was left behind");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(text.matches("700 pages filled").count(), 2, "{text}{}", err(&output));
        assert!(
            err(&output).contains("VMM vm.3: the VMM's handshake is refused"),
            "{}",
            err(&output)
        );
    }
}

#[test]
fn the_control_socket_saves_a_vmm_that_the_pager_did_not_start() {
    let bench = Bench::new();
    let numbers: Vec<u32> = (0..100).collect();
    fs::write(bench.path("mem"), memory(&numbers)).unwrap();
    bench.ok(&["import", "mem", "store"]);
    let pager = Pager::start(
        &bench,
        &["store", "--control", "ctl", "--name", "web", "--socket-mode", "0660", "--budget", "8"],
    );
    let Some(vmm) = Vmm::new(numbers.len()) else { return };
    let stream = pager.connect(&bench.path("socket"));
    vmm.hand_over(&stream);
    let mode = fs::metadata(bench.path("socket")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    assert_eq!(fs::metadata(bench.path("ctl")).unwrap().permissions().mode() & 0o777, 0o600);
    // SAFETY: the page is in the reservation, which is mapped writable.
    unsafe { vmm.memory.page_ptr(7).write_bytes(200, 10) };
    let mut control = ControlClient::connect(&bench.path("ctl")).unwrap();
    let snapshot = json!({ "request": "snapshot", "vm": "web.1", "to": "store@next" });
    match control.request(&snapshot) {
        Ok(_) => {}
        Err(error) if error.to_string().contains("CAP_SYS_PTRACE") => {
            return println!("SKIPPED: {error}");
        }
        Err(error) => panic!("{error}"),
    }
    control.request(&json!({ "request": "detach", "vm": "web" })).unwrap();
    pager.terminate();
    assert_eq!(pager.wait().status.code(), Some(0));
    let mut expected = memory(&numbers);
    expected[7 * PAGE_SIZE..][..10].fill(200);
    assert!(vmm.read() == expected);
    bench.ok(&["export", "store@next", "out"]);
    assert!(fs::read(bench.path("out")).unwrap() == expected);
    assert!(!bench.path("ctl").exists() && !bench.path("socket").exists());
}

/// Set in the process that plays the VMM of a pager that is killed: the number of the attempt.
const ORPHAN: &str = "AFRESH_TEST_ORPHAN";

/// The memory of a pager that is killed.
fn numbers_of_orphan() -> Vec<u32> {
    (1..=3000).collect()
}

/// A VMM that reads its memory while its pager is killed. It exits with 0 when it found all
/// content.
fn play_orphan(attempt: usize) -> ! {
    let expected = memory(&numbers_of_orphan());
    let Some(vmm) = Vmm::new(expected.len() / PAGE_SIZE) else { std::process::exit(9) };
    let stream = UnixStream::connect("socket").unwrap();
    vmm.hand_over(&stream);
    let found = |page: usize| {
        // SAFETY: the page is in the reservation, which is mapped readable.
        let bytes = unsafe { std::slice::from_raw_parts(vmm.memory.page_ptr(page), PAGE_SIZE) };
        if bytes != &expected[page * PAGE_SIZE..][..PAGE_SIZE] {
            println!("page {page} begins with {:?}", &bytes[..8]);
            std::process::exit(3);
        }
    };
    found(2999);
    println!("FIRST");
    let uffd = vmm.uffd;
    if attempt % 2 == 1 {
        // The last copy but those of the pager and its watchdog.
        drop(uffd);
    } else {
        std::mem::forget(uffd);
    }
    (0..3000).for_each(found);
    std::process::exit(0);
}

#[test]
fn a_pager_that_is_killed_leaves_no_page_of_zeros_and_no_vmm_that_waits() {
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::ExitStatusExt;
    const NAME: &str =
        "pager::a_pager_that_is_killed_leaves_no_page_of_zeros_and_no_vmm_that_waits";
    if let Ok(attempt) = std::env::var(ORPHAN) {
        play_orphan(attempt.parse().unwrap());
    }
    let bench = Bench::new();
    fs::write(bench.path("mem"), memory(&numbers_of_orphan())).unwrap();
    bench.ok(&["import", "mem", "store", "--encoding", "zstd"]);
    for attempt in 0..2 {
        let pager = Pager::start(&bench, &["store", "--on-demand", "--window", "1"]);
        drop(pager.connect(&bench.path("socket")));
        let mut vmm = Command::new(std::env::current_exe().unwrap())
            .args([NAME, "--exact", "--nocapture"])
            .env(ORPHAN, attempt.to_string())
            .current_dir(bench.0.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(vmm.stdout.take().unwrap()).lines();
        let first = output.by_ref().map(Result::unwrap).find(|line| line.contains("FIRST"));
        if first.is_none() {
            assert_eq!(vmm.wait().unwrap().code(), Some(9));
            return println!("SKIPPED: no userfaultfd");
        }
        // Somewhere in the three thousand faults.
        std::thread::sleep(Duration::from_micros((attempt * 7919 % 23_000) as u64));
        // Killed, and waited for.
        drop(pager);
        let started = Instant::now();
        let status = loop {
            if let Some(status) = vmm.try_wait().unwrap() {
                break status;
            }
            if started.elapsed() > TEST_TIMEOUT {
                vmm.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let rest: Vec<String> = output.map(Result::unwrap).collect();
        match (status.code(), status.signal()) {
            (Some(0), _) => {}
            (_, Some(signal)) if signal == Signal::BUS.as_raw() => {}
            _ => panic!("attempt {attempt}: {status}: {rest:?}"),
        }
    }
}

#[test]
fn the_pager_removes_nothing_but_a_dead_socket() {
    let (bench, ..) = two_snapshots();
    fs::write(bench.path("socket"), "precious").unwrap();
    let message = bench.fails(1, &["pager", "store", "--socket", "socket"]);
    assert!(message.contains("is not a socket"), "{message}");
    assert_eq!(fs::read_to_string(bench.path("socket")).unwrap(), "precious");
    fs::remove_file(bench.path("socket")).unwrap();
    drop(std::os::unix::net::UnixListener::bind(bench.path("socket")).unwrap());
    let pager = Pager::start(&bench, &["store", "--once"]);
    let stream = pager.connect(&bench.path("socket"));
    rustix::io::write(&stream, b"not a handshake").unwrap();
    let output = pager.wait();
    assert_eq!(output.status.code(), Some(1), "{}", err(&output));
    assert!(err(&output).contains("handshake is refused"), "{}", err(&output));
    assert!(!bench.path("socket").exists());
}

/// The path of a program of systemd.
fn systemd(program: &str) -> Option<PathBuf> {
    let found = ["/usr/bin", "/bin"].map(|dir| Path::new(dir).join(program));
    let found = found.into_iter().find(|path| path.is_file());
    if found.is_none() {
        println!("SKIPPED: no {program}");
    }
    found
}

#[test]
fn a_service_manager_passes_the_sockets() {
    let Some(activate) = systemd("systemd-socket-activate") else { return };
    let bench = Bench::new();
    let numbers: Vec<u32> = (0..100).collect();
    fs::write(bench.path("mem"), memory(&numbers)).unwrap();
    bench.ok(&["import", "mem", "store"]);
    let pager =
        bench.command(&["pager", "store", "--metrics", "127.0.0.1:0", "--log-level", "debug"]);
    let mut command = Command::new(activate);
    let (socket, control) = (bench.path("vmms"), bench.path("ctl"));
    command.arg("-l").arg(&socket).arg("-l").arg(&control);
    command.arg("--fdname=vm:control").arg(pager.get_program()).args(pager.get_args());
    if let Some(dir) = pager.get_current_dir() {
        command.current_dir(dir);
    }
    let errors = bench.path("pager-errors");
    let file = fs::File::create(&errors).unwrap();
    command.stdout(Stdio::null()).stderr(file);
    let pager = Pager { child: Some(command.spawn().unwrap()), errors };
    let Some(vmm) = Vmm::new(numbers.len()) else { return };
    // The pager starts with the first connection.
    let stream = pager.connect(&socket);
    vmm.hand_over(&stream);
    assert!(vmm.read() == memory(&numbers));
    let mut client = ControlClient::connect(&control).unwrap();
    client.request(&json!({ "request": "detach", "vm": "vm" })).unwrap();
    pager.wait_for_error("VMM vm.1 has connected");
    let text = fs::read_to_string(&pager.errors).unwrap();
    let port = text.split_once("http://").unwrap().1.split_once("/metrics").unwrap().0;
    let page = metrics(port, "/metrics");
    for line in [
        "# TYPE afresh_pager_filled_pages_total counter",
        "afresh_pager_filled_pages_total{name=\"vm\"} 100",
        "afresh_pager_vm_missing_pages{vm=\"vm.1\"} 0",
        "afresh_pager_endpoints 1",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}: {page}");
    }
    assert!(metrics(port, "/").starts_with("HTTP/1.1 404"));
    pager.terminate();
    let output = pager.wait();
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    // They are the manager's.
    assert!(socket.exists() && control.exists());
}

/// The answer to a request for a page.
fn metrics(address: &str, page: &str) -> String {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    write!(stream, "GET {page} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn options_that_contradict_the_service_manager_are_refused() {
    let Some(activate) = systemd("systemd-socket-activate") else { return };
    let bench = Bench::new();
    fs::write(bench.path("mem"), memory(&[1, 2])).unwrap();
    bench.ok(&["import", "mem", "store"]);
    for (more, word) in [
        (&["--socket", "s"][..], "leave out --socket"),
        (&["--socket-mode", "0660"], "SocketMode="),
        (&["--record"], "--record needs --control"),
        (&["--metrics", "0.0.0.0:0"], "can be reached from other machines"),
    ] {
        let pager = bench.command(&[&["pager", "store"], more].concat());
        let socket = bench.path("vmms");
        let mut command = Command::new(&activate);
        command.arg("-l").arg(&socket).arg(pager.get_program()).args(pager.get_args());
        command.current_dir(pager.get_current_dir().unwrap_or(Path::new(".")));
        let errors = bench.path("pager-errors");
        command.stdout(Stdio::null()).stderr(fs::File::create(&errors).unwrap());
        let pager = Pager { child: Some(command.spawn().unwrap()), errors };
        drop(pager.connect(&socket));
        pager.wait_for_error(word);
        assert_ne!(pager.wait().status.code(), Some(0), "{more:?}");
        let _ = fs::remove_file(&socket);
    }
}
