use super::*;

#[track_caller]
fn assert_is(bytes: &[u8], part: &str) {
    let found = describe(bytes).unwrap_or_default();
    assert!(found.contains(part) && !found.contains('\n'), "{found:?}, expected {part:?}");
}

#[test]
fn files_that_are_something_else_are_told_by_their_first_bytes() {
    assert_is(b"", "empty");
    assert_is(b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n", "git lfs pull");
    assert_is(b"\n <!DOCTYPE HTML>\n<html>", "HTML");
    assert_is(b"\xef\xbb\xbf<html lang=en>", "HTML");
    assert_is(b"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>", "XML");
    assert_is(b"<Error><Code>NoSuchKey</Code></Error>", "XML");
    assert_is(b"{\"error\":\"Repository not found\"}", "Repository not found");
    assert_is(b"{\"message\": \"API rate limit exceeded\"}", "rate limit");
    assert_is(b"PK\x03\x04...", "zip");
    assert_is(b"\x80\x02}q\0.", "pickle");
    assert_is(b"\x1f\x8b\x08\0", "gunzip");
    assert_is(b"\x28\xb5\x2f\xfd\0", "zstd");
    for magic in [b"lmgg", b"fmgg", b"tjgg", b"algg"] {
        assert_is(&[&magic[..], b"\x01\0\0\0"].concat(), "before GGUF");
    }
    assert_is(b"GGUF\x03\0\0\0", "GGUF file");
    assert_is(b"\x10\0\0\0\0\0\0\0{\"a\":", "safetensors");
    assert_is(&[0; 100], "zeros");
    assert_is(b"\xff\xfe{\0\"\0", "UTF-16");
    assert_is(b"{\0\"\0", "UTF-16");
    let mut tar = [b'a'; 300];
    tar[257..262].copy_from_slice(b"ustar");
    assert_is(&tar, "tar");
}

#[test]
fn what_is_nothing_known_stays_unnamed() {
    for bytes in [&b"hello"[..], b"{\"model_type\": \"llama\", \"error\": 1}", b"{\"a\": 1}", b"\x01\x02\x03"] {
        assert_eq!(describe(bytes), None);
    }
}

#[test]
fn a_byte_order_mark_is_no_part_of_the_text() {
    assert_eq!(utf8(b"\xef\xbb\xbf{}".to_vec()).as_deref(), Ok("{}"));
    assert_eq!(utf8(b"{}".to_vec()).as_deref(), Ok("{}"));
    assert!(utf8(b"\xff\xfe{\0}\0".to_vec()).unwrap_err().contains("UTF-16"));
    assert!(utf8(b"{\"a\xff\"}".to_vec()).unwrap_err().contains("byte 3"));
    assert!(json::<serde_json::Value>(b"\xef\xbb\xbf{\"a\": 1}".to_vec()).is_ok());
    let error = json::<serde_json::Value>(b"{\"a\": NaN}".to_vec()).unwrap_err();
    assert!(error.contains("line 1"), "{error}");
}
