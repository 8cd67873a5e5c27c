//! The cost of calls, and limits of CPU time.

use std::time::Duration;

use afresh::{Call, CallError, CallOptions, Guest, LeaseOptions, Options, OutputSource};

const GUEST: &str = r#"(module
    (memory (export "memory") 1)
    (func (export "grow") (param i32) (result i32) (memory.grow (local.get 0)))
    (func (export "touch") (i32.store (i32.const 40960) (i32.const 7)))
    (func (export "spin") (loop (br 0)))
    (func (export "afresh_buffer") (param i32) (result i32) (i32.const 1000))
    (func (export "echo") (param i32) (result i64)
        (i64.or (i64.shl (i64.const 1000) (i64.const 32)) (i64.extend_i32_u (local.get 0)))))"#;

fn guest(options: &Options) -> Guest {
    Guest::from_bytes("the guest", &wat::parse_str(GUEST).unwrap(), options).unwrap()
}

#[test]
fn a_measurement_has_the_bytes_and_the_memory_of_its_calls() {
    let guest = guest(&Options::new());
    let mut lease = guest.lease().unwrap();
    let (_, cost) = lease.measure(|lease| lease.call("echo", b"four").unwrap());
    assert_eq!((cost.input_bytes, cost.output_bytes, cost.dropped_bytes), (4, 4, 0));
    assert_eq!((cost.peak_memory, cost.dirty_pages), (Some(65536), None));
    assert!(!cost.wall.is_zero() && !cost.cpu.is_zero());
    let (_, outer) = lease.measure_pages(|lease| {
        let (grown, inner) = lease.measure(|lease| lease.invoke(&Call::text("grow", ["2"])));
        assert_eq!(grown.unwrap().text(), "1");
        assert_eq!((inner.input_bytes, inner.output_bytes), (1, 1));
        assert_eq!(inner.peak_memory, Some(3 * 65536));
        lease.invoke(&Call::text("touch", [""; 0])).unwrap();
        lease.call("echo", b"12345").unwrap();
    });
    assert_eq!((outer.input_bytes, outer.output_bytes), (6, 6));
    // The input of the call is at the beginning.
    assert_eq!(outer.dirty_pages, Some(2));
    let (failed, cost) = lease.measure(|lease| lease.call("nothing", b"in"));
    assert!(failed.is_err());
    assert_eq!((cost.input_bytes, cost.output_bytes), (2, 0));
}

#[test]
fn a_limit_of_cpu_time_ends_a_busy_module_and_names_itself() {
    let guest = guest(&Options::new().interruptible());
    let limit = Duration::from_millis(50);
    let options = CallOptions::new().cpu_time_limit(limit);
    let error = guest.invoke_with(&Call::text("spin", [""; 0]), &options).unwrap_err();
    assert!(matches!(error, CallError::CpuTime { limit: of, .. } if of == limit), "{error}");
    assert!(error.is_cut_short());
    assert!(error.to_string().contains("CPU time limit of 50ms: raise the limit"), "{error}");
    let lease = LeaseOptions::new().cpu_time_limit(limit);
    let mut lease = guest.lease_with(&lease).unwrap();
    let (error, cost) = lease.measure(|lease| lease.invoke(&Call::text("spin", [""; 0])));
    assert!(matches!(error, Err(CallError::CpuTime { .. })), "{error:?}");
    assert!(cost.cpu >= limit, "{cost:?}");
    drop(lease);
    assert_eq!(guest.call_with("echo", b"a", &options).unwrap(), b"a");
}

#[test]
fn a_guest_that_cannot_be_interrupted_refuses_a_limit_of_cpu_time() {
    let guest = guest(&Options::new());
    let options = CallOptions::new().cpu_time_limit(Duration::from_secs(1));
    let error = guest.call_with("echo", b"a", &options).unwrap_err();
    assert!(matches!(error, CallError::Option { .. }), "{error:?}");
}

#[cfg(linux_guests)]
#[test]
fn the_cost_and_the_limit_of_a_linux_program_count_its_processes_and_no_waits() {
    let options = Options::new().timeout(Duration::from_secs(120)).linux(|sh| sh.grant("/"));
    let guest = match afresh::open("/bin/sh", &options) {
        Ok(guest) => guest,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    let limit = Duration::from_millis(300);
    let limited = CallOptions::new().cpu_time_limit(limit);
    let mut lease = guest.lease().unwrap();
    let (slept, cost) =
        lease.measure(|lease| lease.call_with("", b"sleep 0.7; echo a\n", &limited));
    let slept = slept.unwrap();
    assert_eq!(cost.output_bytes, slept.len() as u64);
    assert!(cost.peak_memory.unwrap() > 0 && cost.dirty_pages.is_none(), "{cost:?}");
    let busy = b"(n=0; while [ $n -lt 20000 ]; do n=$((n+1)); done); echo done\n";
    let hear = |_: OutputSource, _: &[u8]| true;
    let (ran, cost) = lease.measure(|lease| lease.call_streaming("", busy, hear));
    ran.unwrap();
    assert!(cost.cpu > Duration::from_millis(1), "{cost:?}");
    assert_eq!((cost.input_bytes, cost.output_bytes), (busy.len() as u64, 5));
    let endless = b"(while :; do :; done)\n";
    let error = lease.call_with("", endless, &limited).unwrap_err();
    assert!(matches!(error, CallError::CpuTime { limit: of, .. } if of == limit), "{error}");
    assert!(lease.failed().is_some());
    drop(lease);
    assert_eq!(guest.call("", b"echo b\n").unwrap(), b"b\n");
}
