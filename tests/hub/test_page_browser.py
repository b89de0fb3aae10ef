"""The hub's page in a browser: its contents as a user sees them, and its requests."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_statuses import GIB, SECOND, TASKS, Busy, Told, client, hub, pipeline, shard
from playwright.sync_api import Browser, Locator, expect, sync_playwright
from playwright.sync_api import Page as Tab

import hub as hub_package
from hub.protocol.status import MemberStatus, ReaderStatus
from hub.security.access import Access
from hub.server.server import HubServer
from hub.web.page import HubPage
from kvspool.cli import main

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="THE PAGE IS NOT LOOKED AT HERE: that needs chromium (on Debian: sudo apt-get install chromium)"
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
PHONE = {"width": 390, "height": 844}
LONGEST = "a" * 100
COLUMNS = ["Client", "Records/s", "Data/s", "Stored", "On disk", "Behind", "Lost", "Refused", "Last seen"]
HOSTILE = ["<img src=x onerror=alert(1)>", "__proto__", "constructor", "</td><script>alert(1)</script>", "a&lt;b\n\"'", LONGEST]
expect.set_options(timeout=20_000)

# The contrast of each text with its background, where it is less than WCAG's AA requires: 4.5, or 3 for large type.
POOR_CONTRASTS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const color = parse(getComputedStyle(element).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
      if (color[3] !== 0) throw new Error("half transparent");
    }
  };
  const poor = [];
  let texts = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const [one, other] = [light(parse(style.color)), light(ground(element))].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    texts++;
    if ((one + 0.05) / (other + 0.05) < least) poor.push(`${walker.currentNode.textContent}: ${(one + 0.05) / (other + 0.05)}`);
  }
  return [texts, poor];
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def look(chromium: Browser) -> Iterator[Callable[..., Tab]]:
    """Open a page: `look(page, **options of the context)`. At the end, check that there were no errors, and no requests to others."""
    contexts, complaints, asked, own = [], [], set(), set()

    def open_tab(page: HubPage, **options: Any) -> Tab:
        contexts.append(context := chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}))
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append(dialog.message))
        tab.on("request", lambda request: asked.add(request.url))
        own.add(page.url)
        tab.goto(page.url)
        expect(state(tab)).to_have_text("live")
        return tab

    yield open_tab
    for context in contexts:
        context.close()
    assert [complaint for complaint in complaints if not re.search("ERR_CONNECTION_REFUSED|status of 40[13]", complaint)] == []
    assert [url for url in asked if not url.startswith((*own, "data:image/svg+xml,"))] == []
    assert len(asked) >= 5


def state(tab: Tab) -> Locator:
    return tab.locator("#state")


def names(tab: Tab) -> list[str]:
    """The clients that are seen, in their order."""
    return tab.locator(".client th button:visible").all_inner_texts()


def fact(tab: Tab, name: str) -> Locator:
    """The value of a tile."""
    return tab.locator("#facts > div", has=tab.locator(f"dt:text-is('{name}')")).locator("dd").first


def cell(tab: Tab, name: str, column: str) -> Locator:
    """A client's cell below a column's title."""
    titles = [title.split(" ")[0] for title in tab.locator("#table > thead th").all_inner_texts()]
    row = tab.locator("tr.client", has=tab.get_by_role("button", name=name, exact=True))
    return row.locator("th, td").nth(titles.index(column))


def has_no_sideways_scroll(tab: Tab) -> bool:
    return bool(tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


def test_it_is_live_without_a_reload_and_comes_back_after_the_hub_was_gone(look: Callable[..., Tab]) -> None:
    told = Told(hub([]))
    with HubPage(told) as page:
        tab = look(page)
        tab.evaluate("window.loadedOnce = true")
        expect(tab.locator("#nobody")).to_contain_text("No client has sent anything yet")
        expect(tab.locator("#command")).to_have_text("kvspool ship LOG grpc+tls://hub.example.org:8815")
        expect(tab.locator("#table")).to_be_hidden()
        told.tell(hub([client("JFK", shards=[shard(0, lost=7, behind=1234)]), client("LGA", connections=0)], free_bytes=9 * GIB))
        expect(tab.get_by_role("table", name="Clients")).to_be_visible()
        assert names(tab) == ["JFK", "LGA"]
        expect(tab.locator("#nobody")).to_be_hidden()
        expect(cell(tab, "JFK", "Behind")).to_have_text("1,234")
        told.tell(hub([client("JFK", shards=[shard(0, lost=7, behind=4321, behind_is_estimate=True)]), client("LGA", connections=0)]))
        expect(cell(tab, "JFK", "Behind")).to_have_text("≈ 4,321")
        expect(fact(tab, "Behind")).to_have_text("≈ 4,321")
        told.tell(hub([client("JFK", shards=[shard(0, lost=7, behind=1234)]), client("LGA", connections=0)], free_bytes=9 * GIB))
        expect(fact(tab, "Lost")).to_have_text("7")
        expect(fact(tab, "Disk")).to_have_text("9.0 GiB free")
        expect(tab.locator("#troubles")).to_be_hidden()
        told.tell(hub([client("JFK", records=50_000, bytes=5_000_000, last_seen=SECOND)], free_bytes=GIB, certificate_expires=SECOND))
        expect(tab.get_by_role("alert")).to_contain_text("the disk has 1.0 GiB free, less than its mark of 5.0 GiB")
        expect(tab.get_by_role("alert")).to_contain_text("the certificate has expired")
        expect(fact(tab, "Certificate")).to_have_text("expired")
        assert names(tab) == ["JFK"]
        expect(tab.locator("#charts .curve").first).to_have_attribute("d", re.compile("M.*,.*L"))  # the rates are drawn
        told.tell(RuntimeError("the root is gone"))
        expect(tab.get_by_role("alert")).to_contain_text("the hub's status failed: RuntimeError: the root is gone")
        address = page.address
    expect(state(tab)).to_have_text("lost, trying again")
    told.tell(hub([client("SEA")], address="0.0.0.0:8815", is_secure=False, certificate_expires=0))
    with HubPage(told, address):
        expect(state(tab)).to_have_text("live")
        expect(tab.get_by_role("button", name="SEA")).to_be_visible()
        assert names(tab) == ["SEA"]
        expect(fact(tab, "Certificate")).to_have_text("no TLS")
        expect(tab.get_by_role("alert")).to_be_hidden()
        told.tell(hub([], address="0.0.0.0:8815", is_secure=False))
        expect(tab.locator("#command")).to_have_text("kvspool ship LOG grpc://127.0.0.1:8815")
        assert tab.evaluate("window.loadedOnce")


@pytest.fixture(scope="module")
def busy() -> Iterator[HubPage]:
    with HubPage(Busy(200)) as page:
        yield page


def test_200_clients_are_sorted_filtered_and_unfolded(look: Callable[..., Tab], busy: HubPage) -> None:
    tab = look(busy)
    assert names(tab)[:3] == ["ATL", "ATL-gate-1", "ATL-gate-2"] and len(names(tab)) == 200
    assert names(tab).index("ATL-gate-10") > names(tab).index("ATL-gate-9")
    behind = tab.get_by_role("columnheader", name="Behind")
    behind.get_by_role("button").click()
    assert behind.get_attribute("aria-sort") == "descending"
    assert names(tab)[0] == "CLT-gate-12" and cell(tab, names(tab)[0], "Behind").inner_text() == "39,400"
    behind.get_by_role("button").press("Enter")
    assert behind.get_attribute("aria-sort") == "ascending"
    assert cell(tab, names(tab)[0], "Behind").inner_text() == "?"
    tab.get_by_role("columnheader", name="Client").get_by_role("button").click()
    assert names(tab)[0] == "ATL"
    tab.get_by_role("searchbox", name="names contain").fill("jfk-gate-1")
    assert names(tab) == ["JFK-gate-1", "JFK-gate-10", "JFK-gate-11", "JFK-gate-12"]
    expect(tab.locator("#shown")).to_have_text("4 of 200 shown")
    tab.keyboard.press("Tab")  # on through the titles of the columns to the first client
    for _ in range(9):
        tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    button = tab.get_by_role("button", name="JFK-gate-1", exact=True)
    assert button.get_attribute("aria-expanded") == "true" and button.evaluate("e => e === document.activeElement")
    shards = tab.get_by_role("table", name="Shards of JFK-gate-1")
    assert shards.locator("tbody tr").count() == 8
    assert shards.locator("th").all_inner_texts()[:5] == ["Shard", "Generation", "First", "Next", "Records"]
    own = tab.locator(".details:visible")
    expect(own).to_contain_text("Refused batches")
    expect(own.get_by_role("img", name="Records/s, last 10 min")).to_be_visible()
    expect(own.locator(".chart .curve").first).to_have_attribute("d", re.compile("M.*,.*L"))
    tab.get_by_text("24 hours").click()
    expect(own.get_by_role("img", name="Records/s, last 24 h")).to_be_visible()
    button.press("Enter")
    expect(shards).to_be_hidden()
    tab.get_by_role("searchbox").fill("nowhere")
    expect(tab.locator("#shown")).to_have_text("none of 200 has “nowhere” in its name")
    chart = tab.locator("#charts svg").first
    chart.scroll_into_view_if_needed()
    chart.hover()
    expect(tab.locator("#charts output").first).to_contain_text(":")  # the time that is pointed at


def test_rows_stay_where_they_are_while_one_has_the_focus(look: Callable[..., Tab]) -> None:
    told = Told(hub([client("a", shards=[shard(behind=1)]), client("b", shards=[shard(behind=2)])]))
    with HubPage(told) as page:
        tab = look(page)
        tab.get_by_role("columnheader", name="Behind").get_by_role("button").click()
        assert names(tab) == ["b", "a"]
        tab.get_by_role("button", name="b", exact=True).focus()
        told.tell(hub([client("a", shards=[shard(behind=3)]), client("b", shards=[shard(behind=2)]), client("c")]))
        expect(cell(tab, "a", "Behind")).to_have_text("3")
        assert names(tab) == ["b", "a", "c"]
        tab.get_by_role("searchbox").focus()
        expect(tab.locator(".client th button")).to_have_text(["a", "b", "c"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_on_a_phone_in_both_schemes(look: Callable[..., Tab], busy: HubPage, scheme: str) -> None:
    tab = look(busy, viewport=PHONE, color_scheme=scheme, device_scale_factor=2, is_mobile=True, has_touch=True)
    assert has_no_sideways_scroll(tab)
    tab.get_by_role("button", name="ATL-gate-1", exact=True).tap()
    expect(tab.get_by_role("table", name="Shards of ATL-gate-1")).to_be_visible()
    assert has_no_sideways_scroll(tab)
    assert tab.evaluate("document.getElementById('table').offsetWidth") <= 390 - 2 * 12
    cells = tab.locator("tr.client").nth(1).locator("td")
    assert [found.get_attribute("data-label") for found in cells.all() if found.is_visible()] == COLUMNS[1:]
    assert cells.first.evaluate("cell => getComputedStyle(cell, '::before').content") == '"Records/s"'
    assert tab.locator("#table thead button:visible").all_inner_texts() == COLUMNS  # to sort by
    assert tab.locator("#pipelines tbody tr").first.locator("td:visible").count() == 8
    brightness = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((sum, c) => sum + Number(c), 0)")
    assert brightness > 700 if scheme == "light" else brightness < 100
    texts, poor = tab.evaluate(POOR_CONTRASTS)
    assert texts > 1000 and poor == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_trouble_is_readable_too_and_nothing_moves_with_reduced_motion(look: Callable[..., Tab], scheme: str) -> None:
    one = client("JFK", shards=[shard(lost=5)], refused={"quota": 3})
    readers = [ReaderStatus(name="spark", lag=8, tasks=TASKS)]
    told = Told(hub([one], free_bytes=GIB, certificate_expires=1, error="it hurts", readers=readers))
    with HubPage(told) as page:
        tab = look(page, color_scheme=scheme, reduced_motion="reduce")
        expect(tab.get_by_role("alert")).to_contain_text("it hurts")
        table = tab.get_by_role("table", name="Readers and groups")
        expect(table).to_contain_text("spark")
        expect(table).to_contain_text("1 worker, 2 given, 7 waiting, 4 retried, 3 dead, 5 of 64 of the window; it is full; process 7: 2")
        texts, poor = tab.evaluate(POOR_CONTRASTS)
        assert texts > 50 and poor == []
        assert tab.evaluate("document.getAnimations().length") == 0


def test_pipelines_are_shown_and_a_dead_one_is_said_to_be_silent(look: Callable[..., Tab]) -> None:
    dead = pipeline("dead", state="silent", lag=-1, batch=-1)
    told = Told(hub([], pipelines=[pipeline("delays", records=5000), dead, pipeline("broken", state="failed", error=HOSTILE[0])]))
    with HubPage(told) as page:
        tab = look(page)
        rows = tab.locator("#pipelines tbody tr")
        expect(rows).to_have_count(3)
        assert rows.nth(0).locator("td").all_text_contents()[:7] == ["delays", "running", "251", "12", "5,000", "3", "4"]
        expect(rows.nth(1).locator("td").nth(1)).to_contain_text("no update since")
        assert rows.nth(1).locator("td").nth(3).text_content() == "–"
        expect(rows.nth(2).locator("td").nth(1)).to_have_attribute("title", HOSTILE[0])
        told.tell(hub([client("JFK")]))
        expect(tab.locator("#pipelines")).to_be_hidden()


def test_what_clients_are_called_is_only_ever_text(look: Callable[..., Tab]) -> None:
    clients = [client(name, refused={HOSTILE[0]: 1}, last_seen=1 << 62) for name in HOSTILE]
    told = Told(hub(clients, root=HOSTILE[0], version=HOSTILE[3], error=HOSTILE[0], cut={HOSTILE[0]: 1}))
    with HubPage(told) as page:
        tab = look(page, viewport=PHONE)
        for button in tab.locator(".client button").all():
            button.click()
        expect(tab.locator("#root")).to_have_text(HOSTILE[0])
        assert sorted(tab.locator(".client th button").all_text_contents()) == sorted(HOSTILE)
        told.tell(hub([*clients, client("later")]))  # all of it is drawn again
        expect(tab.get_by_role("button", name="later")).to_be_visible()
        assert tab.locator("img:not(svg), script:not([src]), #table script").count() == 0
        assert has_no_sideways_scroll(tab)


def test_a_stranger_s_script_can_t_do_much_in_the_page(chromium: Browser, busy: HubPage) -> None:
    tab = chromium.new_page()
    tab.goto(busy.url)
    assert tab.evaluate("try { document.body.innerHTML = '<b>x</b>'; 'done' } catch (error) { error.name }") == "TypeError"
    asked = "fetch('http://127.0.0.1:9/').then(() => 'answered', () => 'refused')"
    with tab.expect_console_message(lambda message: "Content Security Policy" in message.text):
        assert tab.evaluate(asked) == "refused"
    tab.close()


def test_axes_have_times_and_missed_samples_are_bridged_and_counted(look: Callable[..., Tab], busy: HubPage) -> None:
    tab = look(busy)
    chart = tab.locator("#charts .chart").first
    times = chart.locator(".times span")
    expect(times.last).to_have_text("now")
    for choice, steps in (("10 minutes", 3), ("24 hours", 4)):
        tab.get_by_text(choice).click()
        found = times.all_inner_texts()
        assert len(found) >= steps + 1 and all(re.fullmatch(r"\d\d:\d\d", text) for text in found[:-1]), found
        places = times.evaluate_all("spans => spans.map((span) => span.getBoundingClientRect().left)")
        assert places == sorted(places)
    assert {text[-3:] for text in found[:-1]} == {":00"}  # whole hours
    assert chart.locator(".scale span").count() == 3
    drawn = tab.evaluate("""() => {
      const chart = charts.records;
      const parts = (path) => path.getAttribute("d").match(/M/g)?.length ?? 0;
      const said = () => [parts(chart.curve), parts(chart.bridges), chart.missed.textContent];
      chart.draw([1, null, 3, null, null, 4, 5], "seconds", 1);
      const gaps = said();
      chart.draw([null, 1, 2, 3], "seconds", 1);
      return [gaps, said().slice(0, 2), chart.missed.hidden];
    }""")
    assert drawn == [[3, 2, "3 seconds without a sample, bridged by dashes"], [1, 0], True]


def test_an_event_after_missed_seconds_leaves_them_empty(look: Callable[..., Tab]) -> None:
    with HubPage(Told(hub([client("JFK")]))) as page:
        tab = look(page)
        tab.wait_for_function("view.history && view.kept")
        kept = tab.evaluate("""() => {
          source.onmessage = null;
          const values = view.history.seconds.records;
          values.length = 0;
          const rates = { records: 7, bytes: 1, connections: 1 };
          const then = view.kept;
          for (const after of [1, 1, 4, 5]) keep({ status: { now: then + after * 1e9 }, rates, clients: {} });
          return values;
        }""")
    assert kept == [7, None, None, 7, 7]  # the same sample again is not counted


def test_records_of_a_shard_are_shown_with_a_token_as_text(look: Callable[..., Tab], tmp_path: Path) -> None:
    with hub_package.create(tmp_path / "root") as root, root.create_client("jfk", bits=0) as shards:
        for number in range(30):
            shards.append({"number": number}, key=b"k")
        shards.append(HOSTILE[0], key=HOSTILE[3])
    command = ["hub", "token", "add", str(tmp_path / "access.toml"), "--name", "desk", "--role", "reader", "--read", "jfk"]
    assert main([*command, "--output", str(tmp_path / "token")]) == 0
    with HubServer(tmp_path / "root", access=Access.load(tmp_path / "access.toml"), listen=("127.0.0.1", 0), least_free=0) as server:
        with HubPage(server.status, records=server.recent.read) as page:
            tab = look(page, viewport=PHONE)
            tab.get_by_role("button", name="jfk", exact=True).click()
            tab.get_by_role("button", name="Records", exact=True).click()
            own = tab.locator(".details:visible")
            expect(own).to_contain_text("Records are shown to callers with the right to read them.")
            own.get_by_label("Token", exact=True).fill("kvs_wrong")
            own.get_by_role("button", name="Read", exact=True).click()
            expect(own).to_contain_text("not authenticated")
            own.get_by_label("Token", exact=True).fill((tmp_path / "token").read_text().strip())
            own.get_by_label("Token", exact=True).press("Enter")
            rows = own.get_by_role("table", name="Records of shard 0 of jfk").locator("tbody tr")
            expect(rows).to_have_count(20)
            cells = rows.first.locator("td")
            assert (cells.last.text_content(), cells.nth(2).text_content()) == (HOSTILE[0], HOSTILE[3])
            expect(own).to_contain_text("sequences 0 to 30")
            assert has_no_sideways_scroll(tab) and own.locator("img").count() == 0
            own.get_by_role("button", name="Older").click()
            expect(rows).to_have_count(11)
            expect(own.get_by_role("button", name="Older")).to_be_hidden()
            texts, poor = tab.evaluate(POOR_CONTRASTS)
            assert texts > 100 and poor == []


def test_groups_and_mirrored_clients_are_shown(look: Callable[..., Tab]) -> None:
    members = [MemberStatus(process="host:7", joined=1, shards=3), MemberStatus(process="host:8", joined=1, shards=5)]
    told = Told(hub([client("jfk", is_mirrored=True)], readers=[ReaderStatus(name="billing", lag=9, members=members)]))
    with HubPage(told) as page:
        tab = look(page)
        row = tab.get_by_role("table", name="Readers and groups").locator("tbody tr")
        assert row.locator("td").all_text_contents() == ["billing", "9", "host:7: 3 shards; host:8: 5 shards"]
        tab.get_by_role("button", name="jfk", exact=True).click()
        expect(tab.locator(".details:visible")).to_contain_text("a mirror, which pulls this copy from another hub")
