def test_x(open_round):
    from consilience.parts import PARTS
    from consilience.testing import trial
    for c in PARTS.values():
        r = open_round(trial(c)); t = r.step(); print(c.name, t.terms, list(t.grads)[:2]); r.rest(); r.finish()
