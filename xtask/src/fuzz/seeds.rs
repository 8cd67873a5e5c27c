//! The seeds of the fuzz targets: inputs that each target accepts, made of the golden snapshots or
//! written out.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Choices that make an empty snapshot, and one of 600 pages with three of them stored, and a
/// working set.
const SNAPSHOTS: [&[u8]; 2] =
    [&[0; 32], &[1, 1, 6, 1, 3, 6, 1, 3, 2, 0, 1, 1, 6, 1, 3, 6, 1, 3, 2]];

/// Messages of a VMM.
const HANDSHAKES: [&str; 2] = [
    r#"[{"base_host_virt_addr":140000000000000,"size":8192,"offset":4096,"page_size":4096,"page_size_kib":4096}]"#,
    r#"[{"base_host_virt_addr":2097152,"size":2097152,"offset":0,"page_size":2097152},{"base_host_virt_addr":8388608,"size":2097152,"offset":2097152,"page_size_kib":2097152}]"#,
];

/// Answers of guests in CBOR: a value with its text, values of every kind, and an error.
const ANSWERS: [&[u8]; 4] = [
    b"\x83\x00\x82\x01\x02\x66[1, 2]",
    b"\x83\x00\xa2\x61a\x82\xf5\xf6\xda\x00\x01\x00\x30\x81\xfb\x3f\xf8\x00\x00\x00\x00\x00\x00\xc0\x61t\xf6",
    b"\x83\x00\x82\xd8\x4f\x48\xff\xff\xff\xff\xff\xff\xff\xff\xd9\x01\x02\x81\x20\xf6",
    b"\x85\x01\x61E\x61m\x68at there\xf6",
];

/// Values of guests in CBOR: of every kind without parts, a map with a set and a list as keys, and
/// pairs of a map with equal keys.
const VALUES: [&[u8]; 3] = [
    b"\x8e\xf7\xf6\xf5\x20\xfa\x3f\x80\x00\x00\x62\xc3\xa9\x41x\xc1\xfa\x3f\x80\x00\x00\xc0\x61t\xd9\x03\xec\x61d\xda\x00\x01\x00\x31\x631.0\xc2\x42\x01\x00\xd8\x27\x82\x61f\x61g\xd9\xa7\xf8\x82\xfa\x3f\x80\x00\x00\xfa\x40\x00\x00\x00",
    b"\xa2\xd9\x01\x02\x81\x01\xd8\x4f\x48\x01\x00\x00\x00\x00\x00\x00\x00\x82\x01\xda\x00\x01\x00\x30\x80\xd8\x25\x500123456789abcdef",
    b"\xa2\x01\xa1\x61a\x01\x01\xd8\x56\x48\x00\x00\x00\x00\x00\x00\xf8\x3f",
];

/// Bodies of requests, each after the letter of its type.
const REQUESTS: [&[u8]; 17] = [
    br#"c{"templateID":"base","autoPause":true,"metadata":{"a":"b"},"envVars":{"A":"b"},"network":{"allowOut":["a"]},"mcp":{"a":{}}}"#,
    br#"u{"allowOut":["a","10.0.0.0/8"],"denyOut":["0.0.0.0/0"],"rules":{"a":[{"transform":{"headers":{"X":"1"}}},{}]},"allow_internet_access":false}"#,
    br#"u{"rules":{"a":[{},{},{},{},{},{},{},{},{}]}}"#,
    br#"b{"fromTemplate":"base","force":false,"steps":[{"type":"RUN","args":["true","root"],"force":true},{"type":"COPY","args":["a","b","","0644"],"filesHash":"0a","forceUpload":true}],"startCmd":"a","readyCmd":"b"}"#,
    br#"a{"name":"a:v1","tags":["v2"],"cpuCount":1,"memoryMB":512,"teamID":"t"}"#,
    br#"g{"target":"a:v1","tags":["v2","v3"]}"#,
    br#"k{"name":"before"}"#,
    br#"r{"to":"before"}"#,
    br#"n{"language":"python","cwd":"/tmp"}"#,
    br#"w{"path":"a","recursive":true,"includeEntry":true,"watcherId":"b"}"#,
    br#"t{"timeout":1,"duration":2,"count":3,"name":"n"}"#,
    br#"e{"code":"1+1","language":"python","context_id":"default","env_vars":{"A":"b"}}"#,
    br#"f{"path":"a","depth":2,"source":"b","destination":"c"}"#,
    br#"p{"process":{"pid":1,"tag":"t"},"signal":"SIGNAL_SIGKILL","pty":{"size":{"rows":2,"cols":3}},"input":{"stdin":"eA=="}}"#,
    b"s\0\0\0\0\x37{\"process\":{\"cmd\":\"sh\",\"args\":[\"-c\"],\"envs\":{\"A\":\"b\"}}}",
    b"mmultipart/form-data; boundary=b\n--b\r\nContent-Disposition: form-data; filename=\"/a\"\r\n\r\ntext\r\n--b--",
    b"x\0\0\0\0\x1f{\"start\":{\"process\":{\"pid\":1}}}\0\0\0\0\x1e{\"data\":{\"input\":{\"pty\":\"x\"}}}\0\0\0\0\x10{\"keepalive\":{}}",
];

/// A stream of frames from an agent, after the length of its pieces.
const FRAMES: &[u8] = b"\x03\x04\0\0\0\x01one\x04\0\0\0\x02two\x03\0\0\0\x03\x80\x80\x09\0\0\0\x05\x07\0\0\0\xf7\xff\xff\xff\x07\0\0\0\x07\x07\0\0\0ab\x04\0\0\0\x00end";

/// Requests of guests to proxied servers.
const REQUEST_HEADS: [&[u8]; 2] = [
    b"GET /v1/%61/../b?q=1 HTTP/1.1\r\nHost: a.test\r\nConnection: keep-alive, X\r\nX: 1\r\n\r\n",
    b"POST /v1 HTTP/1.1\r\nHost: a.test:1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
];

/// A question for the address of a name.
const QUESTION: &[u8] = b"\x07\x09\x01\0\0\x01\0\0\0\0\0\0\x03Api\x07example\x03ORG\0\0\x01\0\x01";

/// Saved file trees as the target takes them, without the page of zeros that follows the first: one
/// with every kind of file, and the layers of one over a directory.
const TREES: [&[u8]; 2] = [
    b"t\x87\0\0\0\0\0\0\0\x01\x80\x80@@\x07\0\0\x06\x01\xed\x03\0\0\x02\x02\x02\x02\x01\x01\x01\x02\x01a\x01\x02\x01\x01\x01h\x01\x03\0\x01\x02\xed\x03\x02\x02\x02\x02\x02\x02\x01\x01\x01\x03\x01b\x01\x03\0\x01\x01d\x01\x05\x03\x01\x01l\x01\x04\x02\x01\x03\xa4\x03\x02\x02\x02\x02\x02\x02\x01\0\x90N\x02\0\x07\x02\xa9\x06\0\x04\xff\x03\x02\x02\x02\x02\x02\x02\x01\x02\x06../a/b\x05\xb6\x03\x02\x02\x02\x02\x02\x02\x01\x03\x83\x02\x06\x80\x03\x02\x02\x02\x02\x02\x02\x01\0\0\0\0\0\x01\x06\x01\x02\x07\0\0\0content)\x03\0\0",
    b"l\x03\x01\x02\x01)gathered:416144fc364fb804463a374a5a87099a\x02\x88'\x01\x05\x01\xed\x03\0\0\0\0\0\0\0\x01\x01\x03\x01d\x01\x98\xd8\xfa\x99\xb7\x88\xbc\x80@\x01\0\x01g\x01\xcd\x95\xa4\xad\x98\xec\x91\x80@\0\0\x01s\x01\x84\xf4\xc4\xbb\xc8\xae\xb1\x80@\x02\0\xdd\xe3\xa0\xb1\xd5\xd1\x89\x80@\xa4\x03\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\0\0\x88'\0\x01\x01\0\0\x88'\xcd\x95\xa4\xad\x98\xec\x91\x80@\xa4\x03\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\0\0\x01\0\x01\x01\0\x01\x01\x84\xf4\xc4\xbb\xc8\xae\xb1\x80@\xff\x03\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\0\x02\x03d/f\x98\xd8\xfa\x99\xb7\x88\xbc\x80@\xed\x03\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\0\x01\x01\x01\x01f\x01\xdd\xe3\xa0\xb1\xd5\xd1\x89\x80@\0\0",
];

/// A tar with one file, compressed with gzip.
const GZIPPED_TAR: &[u8] = b"\x1f\x8b\x08\0\0\0\0\0\x02\x03Kd\xa0=0\0\x023\x13\x130\x0d\x04\xe84\x10\x18!\xb1A\xe2f\x86@J\xc1\x80\x0enc(-.I,\x02Z\xc902AF&\xc3(\x18\x05\xa3`\x14\x8c\x82\x11\x08\0\xc4~s\xb0\0\x08\0\0";

/// A zip with a file that is stored, one that is deflated and a symbolic link.
const ZIP: &[u8] = b"PK\x03\x04\x14\0\0\0\0\0\0\0!\0\x0b\xf9CV\x06\0\0\0\x06\0\0\0\x01\0\0\0sstoredPK\x03\x04\x14\0\0\0\x08\0\0\0!\0\x07\xd6o\x90\x0e\0\0\0\xb4\0\0\0\x03\0\0\0d/fKIM\xcbI,IMQH\x19:\x0c\0PK\x03\x04\x14\0\0\0\0\0\0\0!\0\xeeFR\x06\x03\0\0\0\x03\0\0\0\x01\0\0\0ld/fPK\x01\x02\x14\x03\x14\0\0\0\0\0\0\0!\0\x0b\xf9CV\x06\0\0\0\x06\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x80\x01\0\0\0\0sPK\x01\x02\x14\x03\x14\0\0\0\x08\0\0\0!\0\x07\xd6o\x90\x0e\0\0\0\xb4\0\0\0\x03\0\0\0\0\0\0\0\0\0\0\0\x80\x01%\0\0\0d/fPK\x01\x02\x14\x03\x14\0\0\0\0\0\0\0!\0\xeeFR\x06\x03\0\0\0\x03\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\xff\xa1T\0\0\0lPK\x05\x06\0\0\0\0\x03\0\x03\0\x8f\0\0\0v\0\0\0\0\0";

/// The state of an instance with a memory, a global, a table and a dropped segment, and the states
/// of two modules, one of which has no instance.
const WARM_STATES: [&[u8]; 2] = [
    b"w\x01\x01\x01\0\0\x0e\x01\0\x03\x05\0\x06\x06\x01\x01\0",
    b"n\x02\0\x01\x01\x01\x01\0\0\x0e\x01\0\x03\x05\0\x06\x06\x01\x01\0",
];

/// A module with a function `run`, a memory with data and a global.
const MODULE: &[u8] = b"\0asm\x01\0\0\0\x01\x04\x01\x60\0\0\x03\x02\x01\0\x05\x03\x01\0\x01\x06\x06\x01\x7f\x01A\x05\x0b\x07\x10\x02\x03run\0\0\x06memory\x02\0\x0a\x04\x01\x02\0\x0b\x0b\x08\x01\0A\x08\x0b\x02hi";

/// Requests and whole answers in HTTP.
const EXCHANGES: [&[u8]; 4] = [
    b"GET /a\0HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: y\r\n\r\nhello",
    b"GET / HTTP/1.1\r\n\r\n\0HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n5;x=y\r\nhello\r\nA\r\n0123456789\r\n0\r\nA: b\r\n\r\n",
    b"HEAD / HTTP/1.1\r\n\r\n\0HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    b"POST / HTTP/1.1\r\n\r\n\0HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n",
];

/// The seeds of every target, from the golden snapshots in `folder`.
pub(super) fn seeds(folder: &Path) -> Result<BTreeMap<&'static str, Vec<Vec<u8>>>> {
    let read =
        |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let mut blobs = BTreeMap::new();
    let list = folder.join("v1/blobs/sha256");
    for entry in fs::read_dir(&list).with_context(|| format!("cannot list {}", list.display()))? {
        let path = entry.context("cannot list the golden blobs")?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        blobs.insert(name, read(&path)?);
    }
    let layers = blobs.values().filter(|bytes| !bytes.starts_with(b"{"));
    let index = read(&folder.join("v1/index.json"))?;
    let mut all = BTreeMap::new();
    all.insert("page_layer", layers.map(|bytes| layer_seed(bytes)).collect());
    all.insert("layout", layout_seeds(&blobs, &String::from_utf8_lossy(&index)));
    all.insert("archive", vec![archive_seed(&read(&folder.join("v1.afresh"))?)]);
    all.insert("snapshot", SNAPSHOTS.map(<[u8]>::to_vec).to_vec());
    all.insert("turn", vec![turn_seed()]);
    all.insert("journal", journal_seeds(&folder.join("v1-turns/journals"))?);
    all.insert("vmm_handshake", HANDSHAKES.map(|text| text.as_bytes().to_vec()).to_vec());
    all.insert("program", vec![program_seed()]);
    all.insert("cbor", ANSWERS.map(<[u8]>::to_vec).to_vec());
    all.insert("objects", VALUES.map(<[u8]>::to_vec).to_vec());
    all.insert("json", json_seeds(&blobs, &index));
    all.insert("e2b", REQUESTS.map(<[u8]>::to_vec).to_vec());
    all.insert("agent", vec![FRAMES.to_vec()]);
    all.insert("dns", vec![QUESTION.to_vec()]);
    all.insert("egress", REQUEST_HEADS.map(<[u8]>::to_vec).to_vec());
    all.insert("oci", vec![oci_seed()]);
    all.insert("image_archive", image_archive_seeds());
    all.insert("tree", tree_seeds());
    all.insert("warm_state", WARM_STATES.map(<[u8]>::to_vec).to_vec());
    all.insert("rewrite", module_seeds());
    all.insert("elf", vec![linux_program_seed()]);
    all.insert("http", EXCHANGES.map(<[u8]>::to_vec).to_vec());
    Ok(all)
}

/// Every JSON document of the golden store, each after the letter of its type.
fn json_seeds(blobs: &BTreeMap<String, Vec<u8>>, index: &[u8]) -> Vec<Vec<u8>> {
    let documents = blobs.values().filter(|bytes| bytes.starts_with(b"{"));
    let letter = |bytes: &[u8]| {
        if bytes.starts_with(br#"{"schemaVersion""#) { *b"m" } else { *b"c" }
    };
    let mut seeds: Vec<_> = documents.map(|bytes| [&letter(bytes)[..], bytes].concat()).collect();
    seeds.push([b"i", index].concat());
    seeds
}

/// A module for each rewriting, after its letter: two for a link, and one in a component.
fn module_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<_> = [b"r", b"b", b"a"].map(|kind| [&kind[..], MODULE].concat()).into();
    let length = u16::try_from(MODULE.len()).unwrap_or(u16::MAX).to_le_bytes();
    seeds.push([&b"l"[..], &length, MODULE, b"\0asm\x01\0\0\0"].concat());
    let section = [1, u8::try_from(MODULE.len()).unwrap_or(u8::MAX)];
    seeds.push([&b"c\0asm\x0d\0\x01\0"[..], &section, MODULE].concat());
    seeds
}

/// The trees, with the end of the first one's page.
fn tree_seeds() -> Vec<Vec<u8>> {
    /// Bytes of the page, whose last is not zero.
    const PAGE: usize = 0x329;
    let [tree, layers] = TREES;
    let mut tree = tree.to_vec();
    tree.resize(tree.len() + PAGE - 1, 0);
    tree.push(b'x');
    vec![tree, layers.to_vec()]
}

/// An entry of a tar: its name, type, target and content.
type TarEntry<'a> = (&'a str, u8, &'a str, &'a [u8]);

/// The layer of an image, with whiteouts, links and a long name.
const LAYER: [TarEntry<'_>; 9] = [
    ("d/", b'5', "", b""),
    ("d/file", b'0', "", b"content"),
    ("d/deep/er/x", b'0', "", b"1"),
    ("link", b'2', "d", b""),
    ("link/hard", b'1', "d/file", b""),
    ("d/.wh.file", b'0', "", b""),
    ("d/deep/.wh..wh..opq", b'0', "", b""),
    ("PaxHeaders/x", b'x', "", b"16 path=long/er\n"),
    ("short", b'0', "", b"2"),
];

/// A tar as targets take it: without checksums, which they fill in.
fn tar_seed(entries: &[TarEntry<'_>]) -> Vec<u8> {
    let mut tar = Vec::new();
    for (name, kind, target, content) in entries {
        let mut header = vec![0; 512];
        let mut put =
            |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
        put(0, name);
        put(100, "0000644");
        put(124, &format!("{:011o}", content.len()));
        put(136, "00000000001");
        put(157, target);
        put(257, "ustar\x0000");
        header[156] = *kind;
        tar.extend_from_slice(&header);
        tar.extend_from_slice(content);
        tar.resize(tar.len().next_multiple_of(512), 0);
    }
    tar
}

/// A tar and one that is compressed, an archive of `docker save` whose second layer is a link to
/// the first, and a zip with a file that is stored, one that is deflated and a link.
fn image_archive_seeds() -> Vec<Vec<u8>> {
    let manifest =
        br#"[{"Config":"c.json","RepoTags":["a:1"],"Layers":["l/layer.tar","m/layer.tar"]}]"#;
    let config = br#"{"config":{"Cmd":["b"]},"rootfs":{"diff_ids":[]}}"#;
    let layer = tar_seed(&LAYER);
    let saved = tar_seed(&[
        ("manifest.json", b'0', "", manifest),
        ("c.json", b'0', "", config),
        ("l/layer.tar", b'0', "", &layer),
        ("m/layer.tar", b'2', "../l/layer.tar", b""),
    ]);
    vec![
        [b"t", &layer[..]].concat(),
        [b"T", GZIPPED_TAR].concat(),
        [b"d", &saved[..]].concat(),
        [b"z", ZIP].concat(),
    ]
}

/// An OCI image as the target takes it: its documents with marks in place of digests, and a layer.
fn oci_seed() -> Vec<u8> {
    const MEDIA: &str = "application/vnd.oci.image.layer.v1.tar";
    let index = r#"{"schemaVersion":2,"manifests":[{"digest":"$M","size":1,"platform":{"architecture":"amd64","os":"linux"},"annotations":{"org.opencontainers.image.ref.name":"a"}}]}"#;
    let manifest = format!(
        r#"{{"config":{{"digest":"$C"}},"layers":[{{"mediaType":"{MEDIA}","digest":"$L"}},{{"mediaType":"{MEDIA}","digest":"$L"}}]}}"#
    );
    let config = r#"{"config":{"Entrypoint":["/a"],"Cmd":["b"],"Env":["C=d"],"WorkingDir":"/e"}}"#;
    let layer = tar_seed(&LAYER);
    [index.as_bytes(), b"\0", manifest.as_bytes(), b"\0", config.as_bytes(), b"\0", &layer].concat()
}

/// A guest program: a segment of code, one of data, and relocations of both kinds.
fn program_seed() -> Vec<u8> {
    const DATA: u64 = 4096;
    let (dynamic, rela, relr, len) = (232_u64, 344_u64, 368_u64, 384_u64);
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    let mut put = |value: u64, size: usize| file.extend_from_slice(&value.to_le_bytes()[..size]);
    // The rest of the identification, and the header.
    put(0, 8);
    put(0, 1);
    let sizes = [2, 2, 4, 8, 8, 8, 4, 2, 2, 2, 2, 2, 2];
    let header = [3, 62, 1, 64, 64, 0, 0, 64, 56, 3, 0, 0, 0];
    header.into_iter().zip(sizes).for_each(|(value, size)| put(value, size));
    // Type, flags, offset, address, length in the file and in memory.
    let segments = [
        [1, 5, 0, 0, len, len],
        [1, 6, 0, DATA, 0, 8192],
        [2, 4, dynamic, dynamic, rela - dynamic, rela - dynamic],
    ];
    for [kind, flags, offset, address, stored, size] in segments {
        put(kind, 4);
        put(flags, 4);
        [offset, address, address, stored, size, 4096].into_iter().for_each(|value| put(value, 8));
    }
    let entries =
        [(7, rela), (8, relr - rela), (9, 24), (36, relr), (35, len - relr), (37, 8), (0, 0)];
    entries.into_iter().flat_map(|(tag, value)| [tag, value]).for_each(|value| put(value, 8));
    // A word that becomes the base and 5; a word, and the third and fifth behind it.
    [DATA, 8, 5, DATA + 64, 0b10_1001].into_iter().for_each(|value| put(value, 8));
    file
}

/// A program of a Linux guest: a segment of code with the headers, one of data, and a loader.
fn linux_program_seed() -> Vec<u8> {
    const LOADER: &[u8] = b"/lib64/ld-linux-x86-64.so.2\0";
    let headers = 64 + 3 * 56;
    let len = headers + LOADER.len() as u64;
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    let mut put = |value: u64, size: usize| file.extend_from_slice(&value.to_le_bytes()[..size]);
    put(0, 8);
    put(0, 1);
    let sizes = [2, 2, 4, 8, 8, 8, 4, 2, 2, 2, 2, 2, 2];
    let header = [3, 62, 1, 64, 64, 0, 0, 64, 56, 3, 0, 0, 0];
    header.into_iter().zip(sizes).for_each(|(value, size)| put(value, size));
    // Type, flags, offset, address, length in the file and in memory.
    let segments = [
        [3, 4, headers, headers, LOADER.len() as u64, LOADER.len() as u64],
        [1, 5, 0, 0, len, len],
        [1, 6, 0, 4096, 16, 8192],
    ];
    for [kind, flags, offset, address, stored, size] in segments {
        put(kind, 4);
        put(flags, 4);
        [offset, address, address, stored, size, 4096].into_iter().for_each(|value| put(value, 8));
    }
    file.extend_from_slice(LOADER);
    file
}

/// A turn of three pages and five bytes of state, with a step of every kind.
fn turn_seed() -> Vec<u8> {
    let mut program = vec![1 << 2, 2, 1 << 2 | 1, 2 << 2 | 2, 0, 3, 1, 9, 0, 2, 8, 7, 1 << 2 | 3];
    program.extend_from_slice(&[5; 4096]);
    program.extend_from_slice(&[3 << 1, 1, 2 << 1 | 1, 6, 6]);
    let mut seed = b"AFRESHTN".to_vec();
    seed.extend_from_slice(&1_u32.to_le_bytes());
    seed.extend_from_slice(&0_u32.to_le_bytes());
    let len = program.len() as u64;
    for length in [3, 4, 4, 5, len, len] {
        seed.extend_from_slice(&length.to_le_bytes());
    }
    seed.extend_from_slice(&[0; 64]);
    seed.extend_from_slice(&program);
    seed
}

/// The golden journal as it is and with digests that the target fills in, and the programs of two
/// turns: the second patches and copies a page that the first patched.
fn journal_seeds(folder: &Path) -> Result<Vec<Vec<u8>>> {
    let mut seeds = Vec::new();
    for entry in fs::read_dir(folder).context("cannot list the golden journals")? {
        let journal = fs::read(entry.context("cannot list the golden journals")?.path());
        let journal = journal.context("cannot read a golden journal")?;
        seeds.extend([[b"j", &journal[..]].concat(), [b"r", &journal[..]].concat()]);
    }
    let first = [2 << 2, 1, 1 << 2 | 1, 2 << 2 | 2, 0, 3, 1, 9, 0, 2, 8, 7, 3 << 1, 1, 5, 6, 6];
    let second = [1 << 2 | 2, 3, 0, 1, 5, 1 << 2, 3, 5 << 1, 0];
    let mut programs = vec![b't'];
    for (signed, pages, program) in [(0, 4, &first[..]), (1, 2, &second)] {
        programs.extend([program.len() as u8, 0, signed, 0, pages, 0, 5, 0, 0, 0]);
        programs.extend_from_slice(program);
    }
    seeds.push(programs);
    Ok(seeds)
}

/// A page layer as the target takes it: the number of its pages, and what follows them.
fn layer_seed(bytes: &[u8]) -> Vec<u8> {
    const PAGE: usize = 4096;
    // Compressed layers begin with a frame of zstd, and are short.
    let pages = if bytes.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) { 0 } else { bytes.len() / PAGE };
    let mut seed = vec![pages as u8];
    seed.extend_from_slice(&bytes[pages * PAGE..]);
    seed
}

/// Configuration, manifest and index of each snapshot, with marks in place of digests and lengths.
fn layout_seeds(blobs: &BTreeMap<String, Vec<u8>>, index: &str) -> Vec<Vec<u8>> {
    let mark = |text: &str, name: &str, mark: char| {
        let size = blobs[name].len();
        let marked = format!("\"${mark}\",\"size\":${}", mark.to_ascii_lowercase());
        text.replace(&format!("\"sha256:{name}\",\"size\":{size}"), &marked)
    };
    let mut seeds = Vec::new();
    for (id, manifest) in blobs {
        let manifest = String::from_utf8_lossy(manifest);
        let named = manifest.split_once("config.v1+json\",\"digest\":\"sha256:");
        let Some(config) = named.and_then(|(_, rest)| rest.get(..64)) else { continue };
        let parts = [
            String::from_utf8_lossy(&blobs[config]).into_owned(),
            mark(&manifest, config, 'C'),
            mark(index, id, 'M').replace("\"base\"", "\"a\""),
        ];
        seeds.push(parts.join("\0").into_bytes());
    }
    seeds
}

/// An archive as the target takes it: pages become zeros, and blocks of zeros are counted.
fn archive_seed(bytes: &[u8]) -> Vec<u8> {
    const BLOCK: usize = 512;
    let mut seed = Vec::new();
    let mut zeros = 0u8;
    for page in bytes.chunks(8 * BLOCK) {
        let says = |word: &[u8]| page.windows(word.len()).any(|part| part == word);
        let dull = ![b"ustar".as_slice(), b"AFRESHPG", b"{\""].iter().any(|word| says(word));
        for block in page.chunks(BLOCK) {
            if (dull || block.iter().all(|byte| *byte == 0)) && zeros < u8::MAX {
                zeros += 1;
                continue;
            }
            if zeros > 0 {
                seed.extend([0xfe, zeros]);
                zeros = 0;
            }
            seed.extend_from_slice(block);
        }
    }
    seed
}
