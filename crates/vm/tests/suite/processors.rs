//! A guest sees the processor of its template, on this host and on every host that thaws it.

use crate::common::{guest, kvm, words};
use afresh_vm::{
    BuildError, CallError, CpuTemplate, Frozen, GuestError, Incompatible, KvmError, Sandbox,
    ThawError,
};

/// The templates that this host can serve.
fn templates() -> Vec<CpuTemplate> {
    let all = [
        CpuTemplate::v2(),
        CpuTemplate::v3(),
        CpuTemplate::v3().with("sha").unwrap().without("rdrand").unwrap(),
        CpuTemplate::v4(),
        CpuTemplate::host().unwrap(),
    ];
    let served = |template: &CpuTemplate| {
        let built = Sandbox::builder().cpu(template.clone()).build(&guest("dirty"));
        match built {
            Ok(_) => true,
            Err(error) => {
                assert_ne!(template.name(), "host", "{error}");
                println!("SKIPPED: CPU template {template} is unavailable here: {error}");
                false
            }
        }
    };
    all.into_iter().filter(served).collect()
}

/// EAX, EBX, ECX and EDX of a leaf as the guest sees them.
fn cpuid(sandbox: &mut Sandbox, leaf: u64, index: u64) -> [u32; 4] {
    let output = sandbox.run(&words(&[9, leaf, index])).unwrap();
    let word =
        |at: usize| u64::from_le_bytes(output[at * 8..at * 8 + 8].try_into().unwrap()) as u32;
    [word(0), word(1), word(2), word(3)]
}

/// Some features and where CPUID shows them: leaf, register, bit.
const PLACES: [(&str, u64, usize, u32); 12] = [
    ("sse4.2", 1, 2, 20),
    ("aes", 1, 2, 25),
    ("avx", 1, 2, 28),
    ("rdrand", 1, 2, 30),
    ("avx2", 7, 1, 5),
    ("avx512f", 7, 1, 16),
    ("adx", 7, 1, 19),
    ("sha", 7, 1, 29),
    ("gfni", 7, 2, 8),
    ("vaes", 7, 2, 9),
    ("avx512vnni", 7, 2, 11),
    ("lzcnt", 0x8000_0001, 2, 5),
];

#[test]
fn a_guest_sees_what_its_template_holds_and_nothing_else() {
    if !kvm() {
        return;
    }
    for template in templates() {
        let mut sandbox = Sandbox::builder().cpu(template.clone()).build(&guest("dirty")).unwrap();
        assert_eq!(sandbox.cpu(), &template);
        for (name, leaf, register, bit) in PLACES {
            let shown = cpuid(&mut sandbox, leaf, 0)[register] >> bit & 1 == 1;
            assert_eq!(shown, template.has(name), "{name} under {template}");
        }
        let plain = Sandbox::builder().cpu(CpuTemplate::v2()).build(&guest("dirty"));
        if matches!(plain, Err(BuildError::Kvm(KvmError::OwnCpuid { .. }))) {
            println!("SKIPPED: KVM is paravirtual here, and the processor itself answers CPUID");
            continue;
        }
        let leaf_seven = cpuid(&mut sandbox, 7, 0);
        assert_eq!(leaf_seven[1] & 1, 0, "FSGSBASE under {template}");
        assert_eq!(
            leaf_seven[2] & (1 << 3 | 1 << 5),
            0,
            "protection keys, WAITPKG under {template}"
        );
        let extended =
            if template.has("avx512f") { 0xe7 } else { 3 | u32::from(template.has("avx")) << 2 };
        assert_eq!(cpuid(&mut sandbox, 0xd, 0)[0], extended, "XCR0 under {template}");
        assert_eq!(cpuid(&mut sandbox, 0x8000_0002, 0)[0].to_le_bytes(), *b"afre");
        sandbox.verify().unwrap();
    }
}

#[test]
fn wide_registers_that_a_template_leaves_out_are_off() {
    if !kvm() {
        return;
    }
    for template in templates() {
        let builder = Sandbox::builder().cpu(template.clone());
        let mut sandbox = builder.build(&guest("taint")).unwrap();
        for (what, feature) in [(b'y', "avx"), (b'Y', "avx512f")] {
            let outcome = sandbox.run(&[what]);
            match outcome {
                Ok(_) => assert!(template.has(feature), "{feature} works under {template}"),
                Err(CallError::Guest(GuestError::Crash(_))) => {
                    assert!(!template.has(feature), "{feature} does not work under {template}");
                }
                other => panic!("{feature} under {template}: {other:?}"),
            }
            sandbox.verify().unwrap();
        }
    }
}

#[test]
fn a_snapshot_keeps_the_processor_that_the_guest_was_warmed_up_with() {
    if !kvm() {
        return;
    }
    for template in templates() {
        let builder = Sandbox::builder().cpu(template.clone());
        let mut sandbox = builder.build(&guest("dirty")).unwrap();
        let frozen = sandbox.pristine().freeze().unwrap();
        assert_eq!(frozen.cpu_template(), template.name());
        let names: Vec<&str> = template.features().collect();
        assert_eq!(frozen.build().cpu, names);
        // The builder's template has no effect.
        let mut thawed = Sandbox::builder().cpu(CpuTemplate::v2()).thaw(&frozen).unwrap();
        assert_eq!(thawed.cpu(), &template);
        let mut fork = thawed.pristine().fork().unwrap();
        for leaf in [1, 7, 0xd, 0x8000_0001, 0x8000_0007, 0x8000_0008] {
            let seen = cpuid(&mut sandbox, leaf, 0);
            assert_eq!(cpuid(&mut thawed, leaf, 0), seen, "leaf {leaf:#x} under {template}");
            assert_eq!(cpuid(&mut fork, leaf, 0), seen, "leaf {leaf:#x} under {template}");
        }
    }
}

#[test]
fn missing_features_of_this_host_are_named() {
    if !kvm() {
        return;
    }
    // No processor has all of these.
    let odd = ["xop", "fma4", "tbm", "sha512", "avx512bf16", "3dnow"];
    let host = CpuTemplate::host().unwrap();
    let lacking = odd.into_iter().find(|name| !host.has(name)).unwrap();
    let wanted = CpuTemplate::v2().with(lacking).unwrap();
    let error = Sandbox::builder().cpu(wanted).build(&guest("dirty")).unwrap_err().to_string();
    assert!(error.contains("x86-64-v2+"), "{error}");
    assert!(error.contains(lacking) || error.contains("paravirtual"), "{error}");

    // The same in a snapshot from elsewhere, and an unknown feature.
    let sandbox = Sandbox::builder().build(&guest("dirty")).unwrap();
    let frozen = sandbox.pristine().freeze().unwrap();
    let (pages, bytes) = (frozen.memory().clone(), frozen.bytes().unwrap());
    let with = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = bytes.windows(from.len()).rposition(|window| window == from.as_bytes()).unwrap();
        let mut bytes = bytes.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        let frozen = Frozen::from_parts(pages.clone(), &bytes).unwrap();
        match Sandbox::builder().thaw(&frozen) {
            Err(error @ ThawError::Guest(Incompatible::Cpu { .. })) => error.to_string(),
            other => panic!("{to}: {other:?}"),
        }
    };
    let error = with("sse4.2", "sse9.2");
    assert!(error.contains("sse9.2") && error.contains("template host"), "{error}");
    if !host.has("xop") {
        let error = with("tsc", "xop");
        // XOP needs AVX, which is among the features of every host that this runs on.
        assert!(error.contains("xop") || !host.has("avx"), "{error}");
    }
}
