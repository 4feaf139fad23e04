use super::translate;

#[test]
fn most_expressions_stay_as_they_are() {
    for same in [
        r"'s|'t| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r"[^\r\n\p{L}\p{N}]?+\p{L}++",
        r"[\p{Lu}&&[^\p{Han}]]+",
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}]"##,
        "[一-龥]+",
        r"(?<=a)b(?<name>c)\k<name>",
    ] {
        assert_eq!(translate(same).unwrap(), same);
    }
}

#[test]
fn what_means_something_else_is_said_otherwise() {
    for (source, translated) in [
        (r"\s+$", r"(?m)\s+$"),
        (r"^a", r"(?m)^a"),
        (r"[^$]", r"[^$]"),
        (r"(?m:a.b)", r"(?s:a.b)"),
        (r"(?mi-x)a", r"(?si-x)a"),
        (r"\h+[\h_]", r"[0-9a-fA-F]+[0-9a-fA-F_]"),
        (r"\w", r"[[\w²³¹¼-¾]&&[^\x{200C}\x{200D}]]"),
        (r"[^\w\s]", r"[^[\w&&[^\x{200C}\x{200D}]]\s]"),
        (r"[[:alpha:]_]", r"[\p{Alphabetic}_]"),
        (r"[^[:^digit:]]", r"[^[^\p{Nd}]]"),
        (r"[[a-c]:]", r"[[a-c]:]"),
        (r"[]a]", r"[\]a]"),
        (r"\p{^L}\P{^Lu}", r"\P{L}\p{Lu}"),
        (r"\p{Alnum}", r"[\p{Alphabetic}\p{Nd}]"),
        (r"\u4E00", r"\x{4E00}"),
        (r"\p{N}{1,3}+", r"(?:\p{N}{1,3})+"),
        (r"a(b|c){2}+d", r"a(?:(b|c){2})+d"),
        (r"x{,3}", r"x{0,3}"),
        (r"\<a\>", r"<a>"),
        ("\\。", "。"),
        (r"[a~~b]", r"[a\~\~b]"),
    ] {
        assert_eq!(translate(source).unwrap(), translated, "{source}");
    }
}

#[test]
fn an_expression_cut_short_is_refused() {
    for source in [r"a\", "[a", r"\p{L", r"\u12", "[[:alpha:]"] {
        assert!(translate(source).unwrap_err().contains("ends too early"), "{source}");
    }
}
