//! GGUF models in several files: read from any part, with faults of parts reported.

use std::fs;
use std::path::{Path, PathBuf};

use moeworks_model::gguf::GgufFile;
use moeworks_model::only_gguf;
use moeworks_ops::Context;

use crate::common::{assert_same_bits, fixture};

/// A tensor of a header as its bytes, without its offset, and its data.
pub(crate) struct RawTensor {
    pub(crate) info: Vec<u8>,
    pub(crate) data: Vec<u8>,
}

/// A fixture split up: the bytes of its keys, their number, and its tensors.
pub(crate) struct Raw {
    keys: Vec<u8>,
    num_keys: u64,
    pub(crate) tensors: Vec<RawTensor>,
}

pub(crate) fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Raw {
    pub(crate) fn of(name: &str) -> Self {
        let path = fixture("gguf").join(format!("{name}.gguf"));
        let (bytes, file) = (fs::read(&path).unwrap(), GgufFile::open(&path).unwrap());
        let position = |name: &str| {
            let wanted = string(name);
            bytes.windows(wanted.len()).position(|window| window == wanted).unwrap()
        };
        let mut named: Vec<(usize, &String)> = file.tensors().keys().map(|name| (position(name), name)).collect();
        named.sort_unstable();
        let tensors = named.iter().map(|&(at, name)| {
            let tensor = &file.tensors()[name];
            let len = 8 + name.len() + 4 + 8 * tensor.shape.len() + 4;
            RawTensor { info: bytes[at..at + len].to_vec(), data: bytes[tensor.range.clone()].to_vec() }
        });
        let num_keys = u64::from_le_bytes(bytes[16..24].try_into().unwrap());
        Self { keys: bytes[24..named[0].0].to_vec(), num_keys, tensors: tensors.collect() }
    }

    /// Adds a key, in the place of one of this name.
    pub(crate) fn add_key(&mut self, name: &str, ty: u32, value: &[u8]) {
        let wanted = string(name);
        if let Some(at) = self.keys.windows(wanted.len()).position(|window| window == wanted) {
            // A name that nobody reads.
            self.keys[at + 8..at + wanted.len()].fill(b'x');
        }
        self.keys.extend([&wanted[..], &ty.to_le_bytes(), value].concat());
        self.num_keys += 1;
    }

    /// The whole file.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        Part { raw: self, has_keys: true, tensors: &self.tensors, split: None }.bytes()
    }
}

/// A part: with the model's keys or none, and with its split keys.
struct Part<'a> {
    raw: &'a Raw,
    has_keys: bool,
    tensors: &'a [RawTensor],
    /// Its number from 0, the count of parts, and the number of all tensors.
    split: Option<[u32; 3]>,
}

impl Part<'_> {
    fn write(&self, path: &Path) {
        fs::write(path, self.bytes()).unwrap();
    }

    fn bytes(&self) -> Vec<u8> {
        let (mut keys, mut num_keys) =
            if self.has_keys { (self.raw.keys.clone(), self.raw.num_keys) } else { (vec![], 0) };
        for (name, value) in ["split.no", "split.count", "split.tensors.count"].iter().zip(self.split.iter().flatten())
        {
            keys.extend([&string(name)[..], &4_u32.to_le_bytes(), &value.to_le_bytes()].concat());
            num_keys += 1;
        }
        let (mut infos, mut data) = (Vec::new(), Vec::new());
        for tensor in self.tensors {
            infos.extend([&tensor.info[..], &(data.len() as u64).to_le_bytes()].concat());
            data.extend(&tensor.data);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        let counts = [(self.tensors.len() as u64).to_le_bytes(), num_keys.to_le_bytes()].concat();
        let mut bytes = [b"GGUF", &3_u32.to_le_bytes()[..], &counts, &keys, &infos].concat();
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
        bytes
    }
}

/// A model in three parts, the first without tensors, as `gguf-split --no-tensor-first-split` makes them.
struct Split {
    dir: tempfile::TempDir,
    raw: Raw,
}

impl Split {
    fn new() -> Self {
        let split = Self { dir: tempfile::tempdir().unwrap(), raw: Raw::of("mixtral") };
        (0..3).for_each(|index| split.write(index, 3, [index as u32, 3, split.raw.tensors.len() as u32].into()));
        split
    }

    fn path(&self, index: usize, count: usize) -> PathBuf {
        self.dir.path().join(format!("m-{:05}-of-{count:05}.gguf", index + 1))
    }

    fn write(&self, index: usize, count: usize, split: Option<[u32; 3]>) {
        let tensors = &self.raw.tensors;
        let tensors = [&tensors[..0], &tensors[..9], &tensors[9..]][index];
        Part { raw: &self.raw, has_keys: index == 0, tensors, split }.write(&self.path(index, count));
    }

    #[track_caller]
    fn refused(&self, parts: &[&str]) {
        for index in 0..3 {
            if self.path(index, 3).exists() {
                let message = GgufFile::open(&self.path(index, 3)).err().expect("faulty parts are taken").to_string();
                assert!(parts.iter().all(|part| message.contains(part)) && !message.contains('\n'), "{message}");
            }
        }
    }
}

#[test]
fn a_model_in_several_parts_is_read_from_any_of_them() {
    let (ctx, split) = (Context::cpu(1), Split::new());
    let (config, whole) = GgufFile::open(&fixture("gguf").join("mixtral.gguf")).unwrap().load_model(&ctx).unwrap();
    for index in 0..3 {
        let file = GgufFile::open(&split.path(index, 3)).unwrap();
        assert_eq!(file.path(), split.path(index, 3));
        let (found, weights) = file.load_model(&ctx).unwrap();
        assert_eq!(found, config);
        assert_same_bits(
            &weights.compute_copy(&ctx, moeworks_tensor::DType::F32),
            &whole.compute_copy(&ctx, moeworks_tensor::DType::F32),
        );
        assert_eq!(file.tokenizer().unwrap().encode("hello").unwrap(), [104, 101, 258]);
    }
    assert_eq!(only_gguf(split.dir.path()), Some(split.path(0, 3)));
    fs::write(split.dir.path().join("other.gguf"), "GGUF").unwrap();
    assert_eq!(only_gguf(split.dir.path()), None);
}

#[test]
fn later_parts_need_not_say_that_they_are_such() {
    let split = Split::new();
    (1..3).for_each(|index| split.write(index, 3, None));
    for index in 0..3 {
        assert!(GgufFile::open(&split.path(index, 3)).unwrap().load_model(&Context::cpu(1)).is_ok());
    }
}

#[test]
fn faults_of_parts_are_named() {
    let split = Split::new();
    let num_tensors = split.raw.tensors.len() as u32;
    fs::remove_file(split.path(1, 3)).unwrap();
    split.refused(&["m-00002-of-00003.gguf", "not found", "2 is missing"]);
    split.write(2, 3, Some([1, 3, num_tensors]));
    fs::rename(split.path(2, 3), split.path(1, 3)).unwrap();
    split.write(2, 3, Some([1, 3, num_tensors]));
    split.refused(&["m-00003-of-00003.gguf", "part 3 of 3", "part 2 of 3"]);
    let split = Split::new();
    split.write(1, 3, Some([1, 4, num_tensors]));
    let error = GgufFile::open(&split.path(0, 3)).err().unwrap().to_string();
    assert!(error.contains("part 2 of 3") && error.contains("part 2 of 4"), "{error}");
    let split = Split::new();
    split.write(2, 3, Some([1, 3, num_tensors]));
    fs::copy(split.path(2, 3), split.path(1, 3)).unwrap();
    split.write(2, 3, Some([2, 3, num_tensors]));
    split.refused(&["m-00003-of-00003.gguf", "is also in", "m-00002-of-00003.gguf"]);
    let split = Split::new();
    split.write(0, 3, Some([0, 3, num_tensors + 1]));
    split.refused(&["split.tensors.count", &(num_tensors + 1).to_string(), &num_tensors.to_string()]);
}

#[test]
fn a_part_of_another_name_says_what_it_must_be_called() {
    let split = Split::new();
    let renamed = split.dir.path().join("model.gguf");
    fs::rename(split.path(1, 3), &renamed).unwrap();
    let error = GgufFile::open(&renamed).err().unwrap().to_string();
    assert!(error.contains("-00002-of-00003.gguf"), "{error}");
}

#[test]
fn pieces_cut_by_bytes_are_to_be_joined() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = fs::read(fixture("gguf").join("mixtral.gguf")).unwrap();
    let path = dir.path().join("m.gguf-split-a");
    fs::write(&path, &bytes[..20_000]).unwrap();
    let error = GgufFile::open(&path).err().unwrap().to_string();
    assert!(error.contains("cat m.gguf-split-* > m.gguf"), "{error}");
    fs::write(dir.path().join("m.gguf.part2of2"), &bytes[20_000..]).unwrap();
    let what = moeworks_model::model_path_advice(&dir.path().join("m.gguf.part2of2"));
    assert!(what.contains("cat m.gguf.part* > m.gguf"), "{what}");
}

#[test]
fn numbers_in_another_byte_order_are_named() {
    let mut bytes = fs::read(fixture("gguf").join("llama.gguf")).unwrap();
    bytes[4..8].reverse();
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("big.gguf"), bytes).unwrap();
    let error = GgufFile::open(&dir.path().join("big.gguf")).err().unwrap().to_string();
    assert!(error.contains("big-endian") && error.contains("gguf_convert_endian.py"), "{error}");
}
