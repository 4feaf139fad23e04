//! Hostile and damaged safetensors files: each class gives its own error, which names the file and the tensor.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moeworks_model::safetensors::{
    FileDType, ModelFiles, Payload, SafetensorsError, SafetensorsFile, TensorBytes, write, write_shards,
};
use moeworks_ops::Context;
use moeworks_tensor::DType;
use proptest::prelude::*;
use tempfile::TempDir;

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("model.safetensors")
    }

    /// Opens a file of these bytes.
    fn open(&self, bytes: &[u8]) -> Result<SafetensorsFile, SafetensorsError> {
        fs::write(self.path(), bytes).unwrap();
        SafetensorsFile::open(&self.path())
    }
}

/// A file of this header and this much data.
fn file(header: impl AsRef<[u8]>, data_len: usize) -> Vec<u8> {
    let header = header.as_ref();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header);
    bytes.resize(bytes.len() + data_len, 7);
    bytes
}

/// The error of a file of this header and this much data.
fn fault(header: impl AsRef<[u8]>, data_len: usize) -> SafetensorsError {
    match Folder::new().open(&file(header, data_len)) {
        Ok(_) => panic!("a bad file was opened"),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("model.safetensors") && !text.contains('\n'), "{text}");
            error
        }
    }
}

#[track_caller]
fn assert_header_fault(header: impl AsRef<[u8]>, data_len: usize, part: &str) {
    match fault(header, data_len) {
        SafetensorsError::Header { reason, .. } => assert!(reason.contains(part), "{reason:?}, expected {part:?}"),
        error => panic!("{error}"),
    }
}

const GOOD: &str = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[1,2],"data_offsets":[8,12]}}"#;

#[test]
fn a_good_file_is_read() {
    let folder = Folder::new();
    let opened = folder.open(&file(GOOD, 12)).unwrap();
    assert_eq!(opened.bytes("b").unwrap(), [7; 4]);
    assert_eq!(opened.info("b").unwrap().shape, [1, 2]);
    let ctx = Context::cpu(1);
    let b = opened.tensor(&ctx, "b").unwrap();
    assert_eq!((b.shape(), b.dtype()), (&[1, 2][..], DType::BF16));
    assert_eq!(opened.tensor(&ctx, "a").unwrap().f32s(), [f32::from_le_bytes([7; 4]); 2]);
    assert!(matches!(opened.tensor(&ctx, "c"), Err(SafetensorsError::Missing { tensor, .. }) if tensor == "c"));
}

#[test]
fn f16_is_read_and_other_types_are_refused() {
    let header = r#"{"h":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"i":{"dtype":"I64","shape":[1],"data_offsets":[4,12]}}"#;
    let mut bytes = file(header, 0);
    bytes.extend_from_slice(&[0x00, 0x3c, 0x00, 0xc1]); // 1, -2.5
    bytes.extend_from_slice(&[0; 8]);
    let (folder, ctx) = (Folder::new(), Context::cpu(1));
    let opened = folder.open(&bytes).unwrap();
    let h = opened.tensor(&ctx, "h").unwrap();
    assert_eq!((h.dtype(), h.to_f32_vec()), (DType::F16, vec![1.0, -2.5]));
    let error = opened.tensor(&ctx, "i").unwrap_err();
    assert!(matches!(&error, SafetensorsError::UnsupportedDType { tensor, .. } if tensor == "i"), "{error}");
}

#[test]
fn unaligned_tensors_are_copied() {
    let header =
        r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}"#;
    let mut bytes = file(header, 1);
    bytes.extend_from_slice(&1.5_f32.to_le_bytes());
    let folder = Folder::new();
    assert_eq!(folder.open(&bytes).unwrap().tensor(&Context::cpu(1), "b").unwrap().f32s(), [1.5]);
}

#[test]
fn a_file_cut_short_anywhere_is_refused() {
    let folder = Folder::new();
    let whole = file(GOOD, 12);
    for len in 0..whole.len() {
        match folder.open(&whole[..len]) {
            Err(SafetensorsError::Truncated { len: found, .. }) => assert_eq!(found, len as u64),
            Err(SafetensorsError::OffsetsOutOfRange { .. }) => assert!(len >= whole.len() - 12),
            Err(error) => panic!("{len} bytes: {error}"),
            Ok(_) => panic!("{len} bytes were opened"),
        }
    }
}

#[test]
fn an_absurd_header_length_is_refused() {
    let folder = Folder::new();
    for len in [100_000_001, u64::MAX, 1 << 63] {
        let error = folder.open(&[&len.to_le_bytes()[..], b"{}"].concat()).err().unwrap();
        assert!(matches!(error, SafetensorsError::HeaderTooLarge { len: found, .. } if found == len), "{error}");
    }
    let error = folder.open(&[&1000_u64.to_le_bytes()[..], b"{}"].concat()).err().unwrap();
    assert!(matches!(error, SafetensorsError::Truncated { needed: 1008, .. }), "{error}");
}

#[test]
fn a_header_that_is_no_json_object_is_refused() {
    assert_header_fault("", 0, "does not begin with '{'");
    assert_header_fault(" {}", 0, "does not begin with '{'");
    assert_header_fault("[]", 0, "does not begin with '{'");
    assert_header_fault("{", 0, "EOF");
    assert_header_fault("{}x", 0, "trailing");
    assert_header_fault(b"{\"\xff\":1}", 0, "not UTF-8");
    assert_header_fault(b"{\"a\":\xc3\x28}", 0, "not UTF-8");
    let nested = format!(r#"{{"a":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    assert!(matches!(fault(nested, 0), SafetensorsError::Header { .. }));
    let nested = format!(r#"{{"a":{{"dtype":"F32","shape":{}"#, "[".repeat(1_000_000));
    assert!(matches!(fault(nested, 0), SafetensorsError::Header { .. }));
}

#[test]
fn names_that_come_twice_are_refused() {
    let entry = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    assert_header_fault(format!(r#"{{"a":{entry},"a":{entry}}}"#), 4, r#"duplicate key "a""#);
    assert_header_fault(r#"{"__metadata__":{},"__metadata__":{}}"#, 0, "duplicate key __metadata__");
    assert_header_fault(r#"{"__metadata__":{"k":"1","k":"2"}}"#, 0, r#"duplicate key "k""#);
    let twice = r#"{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}"#;
    assert_header_fault(twice, 4, "duplicate field `shape`");
}

#[test]
fn metadata_that_is_no_text_is_refused() {
    for metadata in ["1", r#"{"k":1}"#, r#"{"k":null}"#, r#"{"k":{}}"#, "[]", "null"] {
        assert_header_fault(format!(r#"{{"__metadata__":{metadata}}}"#), 0, "__metadata__");
    }
}

#[test]
fn tensor_entries_of_another_form_are_refused() {
    for entry in [
        "1",
        "{}",
        r#"{"dtype":"F32","shape":[1]}"#,
        r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}"#,
        r#"{"dtype":1,"shape":[1],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4],"extra":0}"#,
    ] {
        assert_header_fault(format!(r#"{{"w":{entry}}}"#), 4, r#"tensor "w""#);
    }
    let error = fault(r#"{"w":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}"#, 4);
    assert!(matches!(&error, SafetensorsError::UnknownDType { tensor, dtype, .. } if tensor == "w" && dtype == "F33"));
}

#[test]
fn sizes_that_overflow_are_refused() {
    let big = u64::MAX;
    for shape in [
        format!("[{big}]"),
        format!("[{big},{big}]"),
        "[4294967296,4294967296]".to_owned(),
        "[2305843009213693952]".to_owned(),
        // A product of zero does not excuse impossible dims.
        format!("[0,{big},{big}]"),
    ] {
        let error = fault(format!(r#"{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}"#), 0);
        assert!(matches!(&error, SafetensorsError::Size { tensor, .. } if tensor == "w"), "{shape}: {error}");
    }
    let error = fault(r#"{"w":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#, 1);
    assert!(matches!(error, SafetensorsError::Size { .. }), "{error}");
}

#[test]
fn offsets_out_of_range_are_refused() {
    for (begin, end) in [(0, 8), (4, 8), (4, 0), (u64::MAX - 4, u64::MAX), (u64::MAX, 3), (1 << 62, (1 << 62) + 4)] {
        let error = fault(format!(r#"{{"w":{{"dtype":"F32","shape":[1],"data_offsets":[{begin},{end}]}}}}"#), 4);
        assert!(matches!(&error, SafetensorsError::OffsetsOutOfRange { data_len: 4, .. }), "{begin}, {end}: {error}");
    }
    let error = fault(r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4);
    assert!(matches!(error, SafetensorsError::SizeMismatch { expected: 8, found: 4, .. }), "{error}");
}

#[test]
fn overlaps_and_holes_are_refused() {
    let two = |first: &str, second: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},"b":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        )
    };
    for (first, second) in [("[0,4]", "[0,4]"), ("[0,4]", "[3,7]"), ("[2,6]", "[0,4]")] {
        let error = fault(two(first, second), 8);
        assert!(matches!(error, SafetensorsError::Overlap { .. } | SafetensorsError::Hole { .. }), "{error}");
    }
    assert!(matches!(fault(two("[0,4]", "[0,4]"), 4), SafetensorsError::Overlap { .. }));
    let holes = [(two("[1,5]", "[5,9]"), 9, 0), (two("[0,4]", "[5,9]"), 9, 4), (two("[0,4]", "[4,8]"), 9, 8)];
    for (header, len, at) in holes {
        let error = fault(header, len);
        assert!(matches!(error, SafetensorsError::Hole { begin, .. } if begin == at), "{error}");
    }
    assert!(matches!(fault("{}", 3), SafetensorsError::Hole { begin: 0, end: 3, .. }));
}

#[test]
fn a_hostile_name_does_not_reach_the_terminal() {
    let header = "{\"\\u001b[2J\\n\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}";
    let text = fault(header, 4).to_string();
    assert!(!text.contains(['\u{1b}', '\n']), "{text:?}");
}

#[test]
fn a_path_that_is_no_file_is_refused() {
    let folder = Folder::new();
    for path in [folder.path(), folder.0.path().to_owned(), PathBuf::from("/dev/null")] {
        let error = SafetensorsFile::open(&path).err().unwrap();
        assert!(matches!(&error, SafetensorsError::Io { path: named, .. } if *named == path), "{error}");
    }
    assert!(matches!(folder.open(b"").err().unwrap(), SafetensorsError::Truncated { len: 0, .. }));
}

#[test]
fn many_tensors_are_read_quickly() {
    let entry = |i: usize| format!(r#""t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{}]}}"#, i + 1);
    let entries: Vec<String> = (0..200_000).map(entry).collect();
    let folder = Folder::new();
    let opened = folder.open(&file(format!("{{{}}}", entries.join(",")), 200_000)).unwrap();
    assert_eq!(opened.tensors().len(), 200_000);
}

proptest! {
    #[test]
    fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Folder::new().open(&bytes);
    }

    #[test]
    fn no_change_of_a_good_file_makes_the_reader_panic(at in 0_usize..125, byte in any::<u8>()) {
        let mut bytes = file(GOOD, 12);
        let len = bytes.len();
        bytes[at % len] = byte;
        let folder = Folder::new();
        if let Ok(opened) = folder.open(&bytes) {
            for name in opened.tensors().keys() {
                let _ = opened.tensor(&Context::cpu(1), name);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// The weights of a published model with flipped bits, inserted or removed bytes, and a truncated end give an
    /// error or tensors. They take no more memory than the bytes can become (a norm's f16 as f32, or a copy).
    #[test]
    fn damage_is_an_error_and_takes_no_more_memory_than_the_file_justifies(
        bits in proptest::collection::vec((any::<proptest::sample::Index>(), 0_u8..8), 0..8),
        header_bits in proptest::collection::vec((0_usize..4000, 0_u8..8), 0..4),
        moved in proptest::option::of((0_usize..4000, any::<u8>(), any::<bool>())),
        cut in proptest::option::of(any::<proptest::sample::Index>()),
    ) {
        let mut bytes = fs::read(crate::common::fixture("mixtral_sliding").join("model.safetensors")).unwrap();
        for (at, bit) in bits {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        header_bits.iter().for_each(|&(at, bit)| bytes[at] ^= 1 << bit);
        match moved {
            Some((at, byte, true)) => bytes.insert(at, byte),
            Some((at, _, false)) => drop(bytes.remove(at)),
            None => {}
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let (ctx, len) = (Context::cpu(1), bytes.len());
        if let Ok(file) = SafetensorsFile::from_bytes(Path::new("damaged"), Arc::new(bytes)) {
            for (name, info) in file.tensors() {
                prop_assert!(info.range.end <= len);
                let _ = file.tensor(&ctx, name);
            }
        }
        prop_assert!(ctx.pool().stats().peak_bytes <= 4 * len + (64 << 10), "{:?} of {len}", ctx.pool().stats());
    }
}

fn tensors(data: &[u8]) -> Vec<TensorBytes<'_>> {
    let tensor = |i: usize, dtype, shape: &[usize], bytes: std::ops::Range<usize>| TensorBytes {
        name: format!("t{i}"),
        dtype,
        shape: shape.to_vec(),
        bytes: data[bytes].into(),
    };
    vec![
        tensor(0, FileDType::BF16, &[3, 2], 0..12),
        tensor(1, FileDType::F32, &[2], 12..20),
        tensor(2, FileDType::BF16, &[1], 20..22),
        tensor(3, FileDType::F32, &[0, 5], 0..0),
    ]
}

fn assert_written(files: &ModelFiles, data: &[u8]) {
    for tensor in tensors(data) {
        let (file, info) = files.get(&tensor.name).unwrap();
        assert_eq!((info.dtype, &info.shape), (tensor.dtype, &tensor.shape));
        assert!(matches!(tensor.bytes, Payload::Lent(bytes) if file.bytes(&tensor.name).unwrap() == bytes));
        assert!(info.range.start.is_multiple_of(if info.dtype == FileDType::F32 { 4 } else { 2 }));
    }
}

#[test]
fn what_is_written_is_read_as_one_file_or_in_shards() {
    let data: Vec<u8> = (0..22).collect();
    let folder = Folder::new();
    let dir = folder.0.path();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    write_shards(dir, &tensors(&data), &metadata, 12).unwrap();
    assert_written(&ModelFiles::open(dir).unwrap(), &data);
    assert!(dir.join("model-00001-of-00002.safetensors").exists() && !folder.path().exists());
    write_shards(dir, &tensors(&data), &metadata, 100).unwrap();
    assert!(!dir.join("model.safetensors.index.json").exists());
    assert_written(&ModelFiles::open(dir).unwrap(), &data);
    assert_eq!(SafetensorsFile::open(&folder.path()).unwrap().metadata(), &metadata);
    write_shards(dir, &tensors(&data), &metadata, 12).unwrap();
    assert_written(&ModelFiles::open(dir).unwrap(), &data);
    assert!(fs::read_dir(dir).unwrap().all(|entry| entry.unwrap().path().extension().unwrap() != "tmp"));
}

#[test]
fn a_failed_write_leaves_nothing_behind() {
    let folder = Folder::new();
    // A folder at the target of the rename.
    fs::create_dir(folder.path()).unwrap();
    fs::write(folder.path().join("x"), "x").unwrap();
    assert!(write(&folder.path(), &tensors(&[0; 22]), &BTreeMap::new()).is_err());
    assert_eq!(fs::read_dir(folder.0.path()).unwrap().count(), 1);
}

fn index_fault(dir: &Path, index: &str) -> SafetensorsError {
    fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
    ModelFiles::open(dir).err().unwrap()
}

#[test]
fn an_index_that_leads_out_of_its_folder_or_to_nothing_is_refused() {
    let outside = tempfile::tempdir().unwrap();
    let dir = outside.path().join("model");
    fs::create_dir(&dir).unwrap();
    fs::write(outside.path().join("o.safetensors"), file(GOOD, 12)).unwrap();
    fs::write(dir.join("in.safetensors"), file(GOOD, 12)).unwrap();
    let absolute = outside.path().join("o.safetensors");
    for name in ["../o.safetensors", absolute.to_str().unwrap(), "", ".", "..", "x/../in.safetensors", "..\\\\o", "C:o"]
    {
        let error = index_fault(&dir, &format!(r#"{{"weight_map":{{"a":"{name}"}}}}"#));
        assert!(matches!(error, SafetensorsError::Index { .. }), "{name}: {error}");
    }
    let error = index_fault(&dir, r#"{"weight_map":{"a":"gone.safetensors"}}"#);
    assert!(matches!(&error, SafetensorsError::Io { path, .. } if path.ends_with("gone.safetensors")), "{error}");
    let error = index_fault(&dir, r#"{"weight_map":{"z":"in.safetensors"}}"#);
    assert!(matches!(&error, SafetensorsError::Missing { tensor, .. } if tensor == "z"), "{error}");
    for index in ["", "[]", "{}", r#"{"weight_map":[]}"#, r#"{"weight_map":{"a":1}}"#] {
        assert!(matches!(index_fault(&dir, index), SafetensorsError::Index { .. }), "{index}");
    }
}

#[test]
fn a_folder_without_weights_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let text = ModelFiles::open(dir.path()).err().unwrap().to_string();
    assert!(text.contains("no model.safetensors") && !text.contains("pickle"), "{text}");
    fs::write(dir.path().join("pytorch_model.bin"), "x").unwrap();
    assert!(ModelFiles::open(dir.path()).err().unwrap().to_string().contains("pickle"));
}
