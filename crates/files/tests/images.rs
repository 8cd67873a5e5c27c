//! OCI images: layers over one another, the image that is meant, and how its program is started.

#[path = "common/archives.rs"]
mod archives;
#[path = "common/layout.rs"]
mod layout;

use afresh_files::{Budget, Kind, Layer, LayerLimits, OciConfig, OciImage, Refused, Tree};
use archives::{FILE, tarred};
use layout::Layout;

fn over(layer: &Layer) -> Tree {
    Tree::new(Budget::default()).with_layer("/", layer).unwrap()
}

fn read(tree: &Tree, path: &str) -> Result<Vec<u8>, Refused> {
    tree.read_path(path, 1 << 20)
}

fn one(name: &str, bytes: &[u8]) -> Vec<Vec<u8>> {
    vec![tarred(&[(name, FILE, "", bytes)])]
}

#[test]
fn layers_of_an_image_stack_and_removals_hold() {
    let layout = Layout::new();
    let directories = tar::EntryType::Directory;
    let image = layout.image(
        &[
            tarred(&[
                ("etc/", directories, "", b""),
                ("etc/a", FILE, "", b"old"),
                ("etc/b", FILE, "", b"goes"),
                ("var/cache/x", FILE, "", b"goes too"),
                ("lib", tar::EntryType::Symlink, "usr/lib", b""),
                ("usr/lib/one", FILE, "", b"1"),
            ]),
            tarred(&[
                ("etc/a", FILE, "", b"new"),
                ("etc/.wh.b", FILE, "", b""),
                ("var/cache/y", FILE, "", b"stays"),
                ("var/cache/.wh..wh..opq", FILE, "", b""),
                ("lib/two", FILE, "", b"2"),
                ("usr/hard", tar::EntryType::Link, "usr/lib/one", b""),
            ]),
        ],
        "{}",
        "",
    );
    layout.index(&[image]);
    let tree = over(&Layer::open(layout.path(), &LayerLimits::default()).unwrap());
    assert_eq!(read(&tree, "etc/a").unwrap(), b"new");
    assert_eq!(read(&tree, "etc/b"), Err(Refused::Missing));
    assert_eq!(read(&tree, "etc/.wh.b"), Err(Refused::Missing));
    let cache = tree.list_path("var/cache").unwrap();
    assert_eq!(cache.iter().map(|e| &*e.name).collect::<Vec<_>>(), [b"y"]);
    assert_eq!(read(&tree, "usr/lib/two").unwrap(), b"2");
    assert_eq!(read(&tree, "usr/hard").unwrap(), b"1");
    assert_eq!(tree.stat_path("lib").unwrap().kind, Kind::Directory);

    // A layer that differs from the manifest is refused.
    for blob in std::fs::read_dir(layout.path().join("blobs/sha256")).unwrap() {
        let path = blob.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        let keep = bytes.clone();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let error = Layer::open(layout.path(), &LayerLimits::default()).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
        std::fs::write(&path, keep).unwrap();
    }
}

#[test]
fn an_image_says_how_its_program_is_started() {
    let layout = Layout::new();
    let config = r#"{"architecture":"amd64","os":"linux","config":{"Entrypoint":["/bin/tool","-v"],"Cmd":["serve"],
        "Env":["PATH=/bin","EMPTY=","A=b=c"],"WorkingDir":"/srv","User":"root","Labels":null}}"#;
    layout.index(&[layout.image(&one("a", b"1"), config, "")]);
    let image = layout.open(None).unwrap();
    let config = image.config();
    assert_eq!(config.entrypoint, ["/bin/tool", "-v"]);
    assert_eq!(config.command, ["serve"]);
    let env = config.env.iter().map(|(name, value)| (&**name, &**value));
    assert_eq!(env.collect::<Vec<_>>(), [("PATH", "/bin"), ("EMPTY", ""), ("A", "b=c")]);
    assert_eq!(config.directory, "/srv");
    assert_eq!(read(&over(image.layer()), "a").unwrap(), b"1");

    // An image without a configuration is valid; one for another machine is refused.
    layout.index(&[layout.image(&one("a", b"1"), "{}", "")]);
    assert_eq!(*layout.open(None).unwrap().config(), OciConfig::default());
    let other = r#"{"architecture":"s390x","os":"linux"}"#;
    layout.index(&[layout.image(&one("a", b"1"), other, "")]);
    let error = layout.open(None).unwrap_err().to_string();
    assert!(error.contains("is for linux/s390x"), "{error}");
}

#[test]
fn an_image_is_chosen_by_name_digest_or_architecture() {
    let layout = Layout::new();
    let name =
        |name: &str| format!(r#","annotations":{{"org.opencontainers.image.ref.name":"{name}"}}"#);
    let first = layout.image(&one("a", b"first"), "{}", &name("first"));
    let second = layout.image(&one("a", b"second"), "{}", &name("second"));
    layout.index(&[first.clone(), second]);
    let bytes = |name: Option<&str>| read(&over(layout.open(name).unwrap().layer()), "a").unwrap();
    assert_eq!(bytes(Some("first")), b"first");
    assert_eq!(bytes(Some("second")), b"second");
    let digest = &first[first.find("sha256:").unwrap()..][..71];
    assert_eq!(bytes(Some(digest)), b"first");
    let error = layout.open(Some("third")).unwrap_err().to_string();
    assert!(error.contains("\"third\"") && error.contains("first, second"), "{error}");
    let error = layout.open(None).unwrap_err().to_string();
    assert!(error.contains("2 images"), "{error}");

    // By machine, below a nested index, as builders for several machines write it.
    let machine = |name: &str| format!(r#","platform":{{"architecture":"{name}","os":"linux"}}"#);
    let (theirs, ours) =
        if cfg!(target_arch = "x86_64") { ("arm64", "amd64") } else { ("amd64", "arm64") };
    let images = [
        layout.image(&one("a", b"theirs"), "{}", &machine(theirs)),
        layout.image(&one("a", b"ours"), "{}", &machine(ours)),
    ];
    let below = format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, images.join(","));
    let below =
        layout.put("application/vnd.oci.image.index.v1+json", below.as_bytes(), &name("both"));
    layout.index(&[below]);
    assert_eq!(bytes(Some("both")), b"ours");
    assert_eq!(bytes(None), b"ours");
}

#[test]
fn a_layout_in_a_tar_is_one() {
    let layout = Layout::new();
    layout.index(&[layout.image(&one("a", b"packed"), "{}", "")]);
    let mut out = tar::Builder::new(Vec::new());
    out.append_dir_all(".", layout.path()).unwrap();
    let file = layout.path().join("image.tar");
    std::fs::write(&file, out.into_inner().unwrap()).unwrap();
    let open = |limits| OciImage::open(&file, None, &limits);
    assert_eq!(read(&over(open(LayerLimits::default()).unwrap().layer()), "a").unwrap(), b"packed");
    assert!(open(LayerLimits { bytes: 100, files: 100 }).is_err());
    // Other entries are not unpacked.
    let names = ["../index.json", "blobs/sha256/../../../x", "/etc/passwd"];
    let entries: Vec<_> = names.iter().map(|name| (*name, FILE, "", &b"evil"[..])).collect();
    std::fs::write(&file, tarred(&entries)).unwrap();
    assert!(open(LayerLimits::default()).unwrap_err().to_string().contains("index.json"));
}

#[test]
fn an_archive_of_an_older_docker_save_is_an_image() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("image.tar");
    let layers = [one("a", b"below").remove(0), one("b", b"above").remove(0)];
    let digest = |bytes: &[u8]| {
        use sha2::{Digest, Sha256};
        Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let ids = layers.each_ref().map(|layer| format!("\"sha256:{}\"", digest(layer)));
    let config = |ids: &str| {
        format!(r#"{{"config":{{"Cmd":["run"],"Env":["A=b"]}},"rootfs":{{"diff_ids":[{ids}]}}}}"#)
    };
    let write = |config: &str, name: &str, manifest: &str| {
        let entries = [
            ("manifest.json", FILE, "", manifest.as_bytes()),
            (name, FILE, "", config.as_bytes()),
            ("one/layer.tar", FILE, "", &layers[0][..]),
            // The layer of another image.
            ("two/layer.tar", tar::EntryType::Symlink, "../three/layer.tar", b""),
            ("three/layer.tar", FILE, "", &layers[1]),
        ];
        std::fs::write(&file, tarred(&entries)).unwrap();
    };
    let manifest = |config: &str| {
        format!(
            r#"[{{"Config":"{config}","RepoTags":["own:1"],"Layers":["one/layer.tar","two/layer.tar"]}}]"#
        )
    };
    let good = config(&ids.join(","));
    let named = format!("{}.json", digest(good.as_bytes()));
    write(&good, &named, &manifest(&named));
    let open = |name| OciImage::open(&file, name, &LayerLimits::default());
    for name in [None, Some("own:1")] {
        let image = open(name).unwrap();
        assert_eq!(image.config().command, ["run"]);
        let tree = over(image.layer());
        assert_eq!(read(&tree, "a").unwrap(), b"below");
        assert_eq!(read(&tree, "b").unwrap(), b"above");
    }
    assert!(open(Some("other")).unwrap_err().to_string().contains("own:1"));
    let small = LayerLimits { bytes: 600, files: 100 };
    assert!(OciImage::open(&file, None, &small).is_err());

    let refused = |config: &str, name: &str, manifest: &str, why: &str| {
        write(config, name, manifest);
        let error = open(None).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    let swapped = config(&format!("{},{}", ids[1], ids[0]));
    refused(&swapped, "c.json", &manifest("c.json"), "is damaged");
    refused(&swapped, &named, &manifest(&named), "is damaged");
    refused(&config(&ids[0]), "c.json", &manifest("c.json"), "another number of layers");
    refused(&good, "c.json", &manifest("none.json"), "no such file");
    refused(&good, "c.json", "{}", "not a usable layer");
    let tags = manifest("c.json").replace("\"own:1\"", &vec!["\"\""; 200].join(","));
    refused(&good, "c.json", &tags, "128 are allowed");
    let outside = r#"[{"Config":"c.json","Layers":["../../etc/passwd"]}]"#;
    refused(&config(""), "c.json", outside, "no such file");
}

#[test]
fn documents_from_strangers_end_in_an_error() {
    let layout = Layout::new();
    // An index that contains itself cannot be made by digest; a chain of indexes ends.
    let mut index = layout.image(&one("a", b"1"), "{}", "");
    for _ in 0..8 {
        let document = format!(r#"{{"manifests":[{index}]}}"#);
        index = layout.put("application/vnd.oci.image.index.v1+json", document.as_bytes(), "");
    }
    layout.index(&[index]);
    assert!(layout.open(None).unwrap_err().to_string().contains("name one another"));
    for digest in ["sha256:../../../../etc/passwd", "sha512:00", "sha256:"] {
        layout.index(&[format!(r#"{{"digest":"{digest}"}}"#)]);
        let error = layout.open(None).unwrap_err().to_string();
        assert!(error.contains("not a SHA-256 digest"), "{error}");
    }
    let blob = r#"{"mediaType":"x.tar","digest":"sha256:00"}"#;
    let many = format!(r#"{{"layers":[{}]}}"#, vec![blob; 600].join(","));
    layout.index(&[layout.put("m", many.as_bytes(), "")]);
    assert!(layout.open(None).unwrap_err().to_string().contains("600 layers"));
    let tight = LayerLimits { bytes: 10, files: 10 };
    layout.index(&[layout.image(
        &[one("a", b"6 byte").remove(0), one("b", b"6 more").remove(0)],
        "{}",
        "",
    )]);
    assert!(OciImage::open(layout.path(), None, &tight).is_err(), "limits are for the whole image");
}

#[test]
fn a_blob_that_changes_after_opening_is_not_served() {
    let layout = Layout::new();
    let plain = tarred(&[("a", FILE, "", b"checked")]);
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, &tarred(&[("b", FILE, "", b"checked")])).unwrap();
    layout.index(&[layout.image(&[plain, packed.finish().unwrap()], "{}", "")]);
    let image = layout.open(None).unwrap();
    for blob in std::fs::read_dir(layout.path().join("blobs/sha256")).unwrap() {
        let path = blob.unwrap().path();
        let len = std::fs::read(&path).unwrap().len();
        std::fs::write(&path, vec![b'x'; len]).unwrap();
    }
    let tree = over(image.layer());
    assert_eq!(read(&tree, "a").unwrap(), b"checked");
    assert_eq!(read(&tree, "b").unwrap(), b"checked");
}

#[test]
fn layers_of_headers_alone_count_together() {
    // Without files each layer unpacks to 3 MiB of headers that are skipped.
    let skipped = tarred(&[("skipped", tar::EntryType::XGlobalHeader, "", &vec![0; 3 << 20])]);
    let layout = Layout::new();
    layout.index(&[layout.image(&[skipped.clone(), skipped.clone()], "{}", "")]);
    let limits = LayerLimits { bytes: 6 << 20, files: 1 };
    layout.open_within(&limits).unwrap();
    let layout = Layout::new();
    layout.index(&[layout.image(&vec![skipped; 8], "{}", "")]);
    let error = layout.open_within(&limits).unwrap_err().to_string();
    assert!(error.contains("more bytes"), "{error}");
}

#[test]
fn directories_that_paths_make_are_counted() {
    let path = |n: usize| format!("{n}/{}x", "d/".repeat(40));
    let files: Vec<Vec<u8>> = (0..30).map(|n| tarred(&[(&path(n), FILE, "", b"1")])).collect();
    let layout = Layout::new();
    layout.index(&[layout.image(&files, "{}", "")]);
    let tree = Tree::new(Budget::default());
    let small = layout.open_within(&LayerLimits { bytes: 1 << 20, files: 30 }).unwrap();
    let error = tree.clone().with_layer("/", small.layer()).unwrap_err().to_string();
    assert!(error.contains("more files than the"), "{error}");
    let large = layout.open_within(&LayerLimits { bytes: 1 << 20, files: 3000 }).unwrap();
    tree.with_layer("/", large.layer()).unwrap();
}
