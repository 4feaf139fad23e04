use super::*;

/// Computes the relative luminance as WCAG 2 defines it.
fn luminance(rgb: [u8; 3]) -> f64 {
    let [r, g, b] = rgb.map(|channel| {
        let c = f64::from(channel) / 255.0;
        if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
    });
    0.2126 * r + 0.7152 * g + 0.0722 * b
}

fn contrast(a: [u8; 3], b: [u8; 3]) -> f64 {
    let (a, b) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

/// Converts sRGB to Oklab with the matrices of Ottosson's article, for distances as the eye sees them.
fn oklab(rgb: [u8; 3]) -> [f64; 3] {
    let [r, g, b] = rgb.map(|channel| {
        let c = f64::from(channel) / 255.0;
        if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
    });
    let l = (0.412_221_470_8 * r + 0.536_332_536_3 * g + 0.051_445_992_9 * b).cbrt();
    let m = (0.211_903_498_2 * r + 0.680_699_545_1 * g + 0.107_396_956_6 * b).cbrt();
    let s = (0.088_302_461_9 * r + 0.281_718_837_6 * g + 0.629_978_700_5 * b).cbrt();
    [
        0.210_454_255_3 * l + 0.793_617_785_0 * m - 0.004_072_046_8 * s,
        1.977_998_495_1 * l - 2.428_592_205_0 * m + 0.450_593_709_9 * s,
        0.025_904_037_1 * l + 0.782_771_766_2 * m - 0.808_675_766_0 * s,
    ]
}

fn distance(a: [u8; 3], b: [u8; 3]) -> f64 {
    oklab(a).iter().zip(oklab(b)).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
}

#[test]
fn letters_can_be_read_on_every_colour() {
    for num_experts in [1, 8, 64, 256] {
        for (expert, shade) in palette(num_experts).into_iter().enumerate() {
            // The text colours of page.css. WCAG 2 asks for a contrast of at least 4.5.
            assert!(contrast(shade.light, [0x14, 0x16, 0x1a]) > 6.0, "{expert} of {num_experts}");
            assert!(contrast(shade.dark, [0xff, 0xff, 0xff]) > 5.5, "{expert} of {num_experts}");
        }
    }
}

#[test]
fn colours_of_eight_experts_are_far_apart_and_those_of_64_are_all_others() {
    let nearest = |colours: &[[u8; 3]]| {
        let pairs = colours.iter().enumerate().flat_map(|(i, &a)| colours[..i].iter().map(move |&b| distance(a, b)));
        pairs.fold(f64::INFINITY, f64::min)
    };
    for (num_experts, least) in [(8, 0.065), (16, 0.03), (64, 0.009)] {
        let light: Vec<[u8; 3]> = palette(num_experts).iter().map(|shade| shade.light).collect();
        let dark: Vec<[u8; 3]> = palette(num_experts).iter().map(|shade| shade.dark).collect();
        assert!(nearest(&light) > least, "{num_experts} light: {}", nearest(&light));
        assert!(nearest(&dark) > least, "{num_experts} dark: {}", nearest(&dark));
    }
}
