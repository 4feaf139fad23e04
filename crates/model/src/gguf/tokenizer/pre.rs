//! The division of text into words by byte-level tokenizers, by the names of `tokenizer.ggml.pre`.
//!
//! llama.cpp (`llama-vocab.cpp`) knows a tokenizer by such a name, and rewrites its regular expressions for its own
//! engine. Here they are those of the `tokenizer.json` that each was made from, with its normalizer if it has one.

use serde_json::{Value as Json, json};

/// A division of text, and the names of the tokenizers that use it.
pub(super) struct Pre {
    names: &'static [&'static str],
    /// The regular expressions; each divides the parts that the ones before it left.
    words: &'static [&'static str],
    /// Regular expressions that apply after bytes are spelled as characters, some of which count as digits.
    cuts_of_spelled_bytes: &'static [&'static str],
    /// True if characters are composed first (NFC).
    composes: bool,
    /// True if a word that is a token becomes that token, whatever the merges say.
    pub(super) ignores_merges: bool,
    /// True if a text begins with a token unless the file says otherwise.
    pub(super) adds_bos: bool,
}

const PLAIN: Pre =
    Pre { names: &[], words: &[], cuts_of_spelled_bytes: &[], composes: false, ignores_merges: false, adds_bos: false };

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const UP_TO_3_DIGITS: &str = r"\p{N}{1,3}";
const DEEPSEEK_CJK: &str = "[一-龥\u{3040}-ゟ゠-ヿ]+";
const DEEPSEEK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const EARLY_DEEPSEEK_CJK: &str = "[一-龥\u{800}-一가-\u{d7ff}]+";
/// The cased letters that DeepSeek LLM lists.
const EARLY_DEEPSEEK_LETTERS: &str = "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const BLOOM: &str = r" ?[^(\s|[.,!?…。，、।۔،])]+";
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED_CODER: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const MINICPM5: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const YOUTU: &str =
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，\u{3001}-\u{303f}\u{fe30}-\u{fe4f}]+|[ㄅ-ㄯ]+|[一-龥\u{3040}-ゟ゠-ヿ]+";
const YOUTU_WORDS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|`]+";

/// llama.cpp's division for files that name none.
const DEFAULT: Pre =
    Pre { names: &["default", ""], words: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"], ..PLAIN };

const PRES: [Pre; 29] = [
    Pre {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        words: &[CL100K],
        ignores_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    Pre { names: &["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"], words: &[CL100K], ..PLAIN },
    Pre { names: &["jais-2"], words: &[JAIS2], ..PLAIN },
    Pre {
        names: &["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "hunyuan"],
        words: &[QWEN2],
        composes: true,
        ..PLAIN
    },
    Pre { names: &["stablelm2", "solar-open", "grok-2"], words: &[QWEN2], ..PLAIN },
    Pre { names: &["qwen35"], words: &[QWEN35], composes: true, ..PLAIN },
    Pre { names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], words: &[O200K], ..PLAIN },
    Pre { names: &["tekken"], words: &[TEKKEN], ignores_merges: true, adds_bos: true, ..PLAIN },
    Pre { names: &["kimi-k2"], words: &[KIMI], ..PLAIN },
    Pre {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        words: &[UP_TO_3_DIGITS, DEEPSEEK_CJK, DEEPSEEK],
        ..PLAIN
    },
    Pre {
        names: &["deepseek-llm"],
        words: &[
            r"[\r\n]",
            EARLY_DEEPSEEK_LETTERS,
            "\\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+",
            r"\s+$",
            EARLY_DEEPSEEK_CJK,
            DIGIT,
        ],
        ..PLAIN
    },
    Pre {
        names: &["deepseek-coder"],
        words: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EARLY_DEEPSEEK_CJK, DIGIT],
        ..PLAIN
    },
    Pre {
        names: &["falcon"],
        words: &[PUNCTUATION, GPT2],
        cuts_of_spelled_bytes: &[r"\p{N}+", "[0-9][0-9][0-9]"],
        ..PLAIN
    },
    Pre {
        names: &["starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
        words: &[DIGIT, GPT2],
        ..PLAIN
    },
    Pre { names: &["command-r"], words: &[DIGIT, GPT2], composes: true, ..PLAIN },
    Pre {
        names: &[
            "gpt-2",
            "gpt2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
        words: &[GPT2],
        ..PLAIN
    },
    Pre { names: &["olmo", "mpt"], words: &[GPT2], composes: true, ..PLAIN },
    Pre { names: &["exaone-moe"], words: &[EXAONE_MOE], ..PLAIN },
    Pre { names: &["bloom", "poro-chat", "gpt3-finnish"], words: &[BLOOM], ..PLAIN },
    Pre { names: &["viking"], words: &[BLOOM, DIGIT], ..PLAIN },
    Pre {
        names: &["chameleon"],
        words: &[
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ],
        adds_bos: true,
        ..PLAIN
    },
    Pre { names: &["tiny_aya", "cohere2moe"], words: &[r"\d{1,3}(?=(?:\d{3})*\b)", O200K], composes: true, ..PLAIN },
    Pre { names: &["superbpe"], words: &[r"\p{N}+", r"(?=(\d{3})+(?!\d))"], ..PLAIN },
    Pre { names: &["bailingmoe", "bailingmoe2", "llada-moe"], words: &[BAILING], ..PLAIN },
    Pre { names: &["seed-coder"], words: &[SEED_CODER], ..PLAIN },
    Pre { names: &["youtu"], words: &[YOUTU, YOUTU_WORDS], ignores_merges: true, ..PLAIN },
    Pre { names: &["minicpm5"], words: &[UP_TO_3_DIGITS, MINICPM5], ignores_merges: true, ..PLAIN },
    Pre { names: &["ufakzeka"], words: &[UFAKZEKA], ..PLAIN },
    Pre { names: &["laguna"], words: &[r"[^\n]+|[\n]+", QWEN2], ..PLAIN },
];

impl Pre {
    /// Returns the division with this name; none if the name is unknown.
    pub(super) fn from_name(name: &str) -> Option<&'static Self> {
        [&DEFAULT].into_iter().chain(&PRES).find(|pre| pre.names.contains(&name))
    }

    /// Lists every name.
    pub(super) fn names() -> impl Iterator<Item = &'static str> {
        PRES.iter().chain([&DEFAULT]).flat_map(|pre| pre.names).copied().filter(|name| !name.is_empty())
    }

    /// Returns true if this is the division for files that name none.
    pub(super) fn is_default(&self) -> bool {
        self.names == DEFAULT.names
    }

    /// Returns the `normalizer` of `tokenizer.json`.
    pub(super) fn normalizer(&self) -> Json {
        if self.composes { json!({ "type": "NFC" }) } else { Json::Null }
    }

    /// Returns the `pre_tokenizer` of `tokenizer.json`.
    pub(super) fn pre_tokenizer(&self) -> Json {
        let uses_regex = self.words.last() == Some(&GPT2);
        let cuts = if uses_regex { &self.words[..self.words.len() - 1] } else { self.words };
        let split = |words: &&str| json!({ "type": "Split", "pattern": { "Regex": words }, "behavior": "Isolated", "invert": false });
        let spelled = self.cuts_of_spelled_bytes.iter().map(split);
        let steps: Vec<Json> = cuts.iter().map(split).chain([byte_level(uses_regex)]).chain(spelled).collect();
        if let [step] = &steps[..] { step.clone() } else { json!({ "type": "Sequence", "pretokenizers": steps }) }
    }
}

/// Returns the step that spells bytes as characters, with GPT-2's division if `uses_regex`.
pub(super) fn byte_level(uses_regex: bool) -> Json {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": uses_regex })
}
