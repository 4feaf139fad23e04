use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use super::*;

fn header(num_experts: usize) -> RecordHeader {
    RecordHeader {
        source: RecordSource::Serve,
        model: "tiny".to_owned(),
        layers: vec![1, 3],
        num_encoder_layers: 0,
        num_experts,
        num_computing: num_experts,
        top_k: 2,
        placement: None,
        ranks_per_node: None,
    }
}

/// A block of three tokens in two runs.
fn tokens() -> TokenBlock {
    let layer = |ids: [u32; 6]| LayerChoices {
        expert_ids: ids.to_vec(),
        weights: Some(vec![0.5, 0.25, 1.0, 0.0, 0.75, 0.125]),
        dropped: Some(vec![false, true, false, false, false, true]),
    };
    TokenBlock {
        time_ms: 1_700_000_000_000,
        runs: vec![Run { id: 7, position: 4, len: 2 }, Run { id: 9, position: 0, len: 1 }],
        first_layer: 0,
        top_k: 2,
        token_ids: Some(vec![10, 11, 70_000]),
        layers: vec![layer([0, 1, 2, NONE, 3, 0]), layer([3, 2, 1, NONE, 0, 1])],
    }
}

fn loads(num_experts: usize) -> LoadBlock {
    let layer = LayerLoads {
        chosen: (0..num_experts as u32).collect(),
        kept: vec![1; num_experts],
        importance: Some(vec![0.5; num_experts]),
    };
    LoadBlock { time_ms: 5, step: 12, num_tokens: 99, first_layer: 1, layers: vec![layer] }
}

fn all_blocks(reader: &mut RecordReader<impl std::io::Read>) -> Vec<Block> {
    std::iter::from_fn(|| reader.next_block().unwrap()).collect()
}

/// Writes a record of three blocks and returns its bytes.
fn record(path: &Path, num_experts: usize) -> Vec<u8> {
    let mut writer = RecordWriter::create(path, header(num_experts)).unwrap();
    writer.write(&Block::Tokens(tokens())).unwrap();
    writer.write(&Block::Loads(loads(num_experts))).unwrap();
    writer.write(&Block::Tokens(tokens())).unwrap();
    fs::read(path).unwrap()
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.routing");
    (dir, path)
}

#[test]
fn blocks_come_back_as_they_were_written() {
    let (_dir, path) = place();
    for num_experts in [4, 300] {
        record(&path, num_experts);
        let mut reader = RecordReader::open(&path).unwrap();
        assert_eq!(reader.header(), &header(num_experts));
        let expected = [Block::Tokens(tokens()), Block::Loads(loads(num_experts)), Block::Tokens(tokens())];
        assert_eq!(all_blocks(&mut reader), expected);
        assert!(reader.damage().is_none());
        assert!(is_record(&path));
    }
}

#[test]
fn a_cut_file_is_read_up_to_its_last_whole_block() {
    let (_dir, path) = place();
    let whole = record(&path, 4);
    let mut ends = Vec::new();
    let mut reader = RecordReader::open(&path).unwrap();
    ends.push(reader.block_end() as usize);
    while reader.next_block().unwrap().is_some() {
        ends.push(reader.block_end() as usize);
    }
    for len in ends[0]..=whole.len() {
        let mut reader = RecordReader::new(&whole[..len], &path).unwrap();
        let num_whole = ends[1..].iter().filter(|&&end| end <= len).count();
        assert_eq!(all_blocks(&mut reader).len(), num_whole);
        assert_eq!(reader.damage().cut_bytes as usize, len - ends[num_whole], "{len}");
    }
    let mut reader = RecordReader::new(&whole[..whole.len() - 1], &path).unwrap();
    all_blocks(&mut reader);
    let expected =
        format!("{} bytes at the end were left out (from byte {}: a cut block)", whole.len() - 1 - ends[2], ends[2]);
    assert_eq!(reader.damage().to_string(), expected);
}

#[test]
fn a_damaged_block_is_passed_over_and_told() {
    let (_dir, path) = place();
    let mut bytes = record(&path, 4);
    let mut reader = RecordReader::new(&bytes[..], &path).unwrap();
    let first = reader.block_end() as usize;
    reader.next_block().unwrap();
    let second = reader.block_end() as usize;
    bytes[second - 1] ^= 1;
    let mut reader = RecordReader::new(&bytes[..], &path).unwrap();
    assert_eq!(all_blocks(&mut reader).len(), 2);
    let expected = format!(
        "1 damaged block of {} bytes were left out (from byte {first}: a checksum that differs)",
        second - first
    );
    assert_eq!(reader.damage().to_string(), expected);
}

#[test]
fn files_that_are_no_record_are_refused_with_the_reason() {
    let (_dir, path) = place();
    let whole = record(&path, 4);
    let error = |bytes: &[u8]| RecordReader::new(bytes, Path::new("x")).err().unwrap().to_string();
    assert_eq!(error(b""), "x: is no record of routing; it must begin with \"MOEROUTE\"");
    assert_eq!(error(b"PAR1...."), "x: is no record of routing; it must begin with \"MOEROUTE\"");
    assert_eq!(error(&whole[..9]), "x: the header of the record is cut");
    assert_eq!(error(&whole[..30]), "x: the header of the record is cut");
    let mut later = whole.clone();
    later[8] = 2;
    assert_eq!(error(&later), "x: is a record of routing of version 2; this program reads version 1");
    let mut damaged = whole.clone();
    damaged[26] ^= 1;
    assert_eq!(error(&damaged), "x: the header of the record is damaged: its checksum differs");
    let mut long = whole;
    long[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(error(&long).contains("must be at most 1048576"), "{}", error(&long));
}

#[test]
fn a_resumed_record_goes_on_behind_the_blocks_that_are_kept() {
    let (_dir, path) = place();
    let whole = record(&path, 4);
    fs::write(&path, &whole[..whole.len() - 3]).unwrap();
    let mut writer = RecordWriter::resume(&path, header(4), |_| true).unwrap();
    assert_eq!(writer.num_blocks(), 2);
    writer.write(&Block::Tokens(tokens())).unwrap();
    assert_eq!(fs::read(&path).unwrap(), whole);
    let is_tokens = |block: &Block| matches!(block, Block::Tokens(_));
    assert_eq!(RecordWriter::resume(&path, header(4), is_tokens).unwrap().num_blocks(), 1);
    let other = RecordWriter::resume(&path, header(5), |_| true).unwrap_err().to_string();
    assert!(other.contains("is the record of another model (of 4 experts, 2 a token)"), "{other}");
}

#[test]
fn blocks_whose_sizes_contradict_are_not_written() {
    let (_dir, path) = place();
    let mut writer = RecordWriter::create(&path, header(4)).unwrap();
    let before = fs::metadata(&path).unwrap().len();
    let mut fail = |change: &dyn Fn(&mut TokenBlock)| {
        let mut block = tokens();
        change(&mut block);
        writer.write(&Block::Tokens(block)).unwrap_err().to_string()
    };
    assert_eq!(fail(&|block| block.layers[0].expert_ids[1] = 4), "expert = 4: must be below 4");
    assert_eq!(fail(&|block| block.runs[0].len = 1), "token ids of a block = 3: must be 2");
    assert_eq!(fail(&|block| block.first_layer = 1), "layers of a block = 2: must be from 1 to 2");
    assert_eq!(fail(&|block| block.top_k = 3), "choices of a layer = 6: must be 9");
    let short = LoadBlock { layers: vec![LayerLoads::default()], ..loads(4) };
    assert_eq!(writer.write(&Block::Loads(short)).unwrap_err().to_string(), "loads of a layer = 0: must be 4");
    assert_eq!(fs::metadata(&path).unwrap().len(), before);
}

#[test]
fn a_header_without_layers_or_experts_is_refused() {
    let (_dir, path) = place();
    let fail = |header: RecordHeader| RecordWriter::create(&path, header).unwrap_err().to_string();
    assert!(fail(RecordHeader { layers: Vec::new(), ..header(4) }).contains("has layers = 0"));
    assert!(fail(RecordHeader { layers: vec![3, 1], ..header(4) }).contains("not in ascending order"));
    assert!(
        fail(RecordHeader { num_computing: 5, ..header(4) }).contains("has num_computing = 5: must be from 1 to 4")
    );
}

#[test]
fn json_lines_have_every_choice_and_load() {
    let (_dir, path) = place();
    record(&path, 4);
    let mut reader = RecordReader::open(&path).unwrap();
    let mut out = Vec::new();
    let exported = write_json_lines(&mut reader, &mut out, Path::new("out")).unwrap();
    assert_eq!((exported.num_tokens, exported.num_loads), (6, 1));
    let lines: Vec<serde_json::Value> =
        String::from_utf8(out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 8);
    assert_eq!((&lines[0]["kind"], &lines[0]["num_experts"]), (&"header".into(), &4.into()));
    let expected = serde_json::json!({
        "kind": "token", "time_ms": 1_700_000_000_000_u64, "id": 7, "position": 5, "token_id": 11, "layers": [
            { "layer": 1, "experts": [2], "weights": [1.0], "dropped": [false] },
            { "layer": 3, "experts": [1], "weights": [1.0], "dropped": [false] },
        ]
    });
    assert_eq!(lines[2], expected);
    assert_eq!(lines[4]["layers"][0]["chosen"], serde_json::json!([0, 1, 2, 3]));
}

#[test]
fn parquet_rows_are_those_of_choices_and_loads() {
    use ::parquet::file::reader::{FileReader, SerializedFileReader};
    use ::parquet::record::RowAccessor;
    let (dir, path) = place();
    record(&path, 4);
    let out = dir.path().join("a.parquet");
    let exported =
        write_parquet(&mut RecordReader::open(&path).unwrap(), fs::File::create(&out).unwrap(), &out).unwrap();
    assert_eq!((exported.num_tokens, exported.num_loads), (6, 1));
    let reader = SerializedFileReader::new(fs::File::open(&out).unwrap()).unwrap();
    let rows: Vec<_> = reader.get_row_iter(None).unwrap().map(Result::unwrap).collect();
    // Five choices of three tokens in two layers, twice, and the loads of four experts in one layer.
    assert_eq!(rows.len(), 2 * 5 * 2 + 4);
    let first = &rows[0];
    assert_eq!((first.get_string(0).unwrap().as_str(), first.get_long(2).unwrap()), ("choice", 7));
    assert_eq!((first.get_int(3).unwrap(), first.get_int(4).unwrap(), first.get_int(5).unwrap()), (1, 0, 4));
    assert_eq!((first.get_float(8).unwrap(), first.get_bool(9).unwrap()), (0.5, false));
    let loads: Vec<i64> =
        rows.iter().filter(|row| row.get_string(0).unwrap() == "load").map(|row| row.get_long(10).unwrap()).collect();
    assert_eq!(loads, [0, 1, 2, 3]);
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        if let Ok(mut reader) = RecordReader::new(&bytes[..], Path::new("x")) {
            while let Ok(Some(_)) = reader.next_block() {}
        }
    }

    #[test]
    fn changed_bytes_never_panic_and_never_add_blocks(changes in prop::collection::vec((0_usize..2000, any::<u8>()), 1..8)) {
        let (_dir, path) = place();
        let mut bytes = record(&path, 4);
        let len = bytes.len();
        changes.iter().for_each(|&(at, byte)| bytes[at % len] = byte);
        if let Ok(mut reader) = RecordReader::new(&bytes[..], &path) {
            prop_assert!(all_blocks(&mut reader).len() <= 3);
        }
    }

    /// Payloads with a right checksum and any content: sizes are checked before memory is taken.
    #[test]
    fn a_payload_of_any_content_is_read_or_refused(
        mut payload in prop::collection::vec(any::<u8>(), 0..200),
        kind in 0_u8..4,
        num_experts in prop::sample::select(vec![4_usize, 300]),
        is_plausible in any::<bool>(),
    ) {
        if let Some(first) = payload.first_mut() {
            *first = kind;
        }
        if is_plausible && payload.len() > 24 {
            payload[1] &= 7;
            payload[2..8].copy_from_slice(&[1, 0, 0, 0, 1, 0]);
            payload[16..24].copy_from_slice(&[1, 0, 0, 0, 3, 0, 0, 0]);
        }
        let (_dir, path) = place();
        let mut bytes = header(num_experts).to_bytes(&path).unwrap();
        let mut head = b"MRB1".to_vec();
        head.extend((payload.len() as u32).to_le_bytes());
        head.extend((xxh3_64(&head) as u32).to_le_bytes());
        head.extend(xxh3_64(&payload).to_le_bytes());
        bytes.extend(head);
        bytes.extend(&payload);
        let mut reader = RecordReader::new(&bytes[..], &path).unwrap();
        match reader.next_block().unwrap() {
            // A writer writes the same bytes again, but for zeros in unused bits and numbers that are not one.
            Some(Block::Tokens(block)) => prop_assert!(block.num_tokens() > 0),
            Some(Block::Loads(block)) => prop_assert_eq!(block.layers.len(), 1),
            None => prop_assert_eq!(reader.damage().num_bad_blocks, 1),
        }
    }

    #[test]
    fn any_choices_come_back(
        ids in prop::collection::vec(prop::option::weighted(0.9, 0_u32..260), 1..60),
        num_experts in prop::sample::select(vec![260_usize, 65_535]),
    ) {
        let (_dir, path) = place();
        let expert_ids: Vec<u32> = ids.iter().map(|id| id.unwrap_or(NONE)).collect();
        let layers = vec![LayerChoices { expert_ids, weights: None, dropped: None }];
        let runs = vec![Run { id: u64::MAX, position: u32::MAX, len: ids.len() as u32 }];
        let block = Block::Tokens(TokenBlock { runs, first_layer: 1, top_k: 1, layers, ..TokenBlock::default() });
        RecordWriter::create(&path, header(num_experts)).unwrap().write(&block).unwrap();
        prop_assert_eq!(RecordReader::open(&path).unwrap().next_block().unwrap(), Some(block));
    }
}
